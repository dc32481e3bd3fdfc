from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.burn import burn_notes, page_legs
from servoscope.alerts.spec import Objective, parse_spec


def objective(target: str, window: str = "30d") -> Objective:
    entry = {"name": "o", "sli": "error_ratio", "target": target, "window": window}
    return parse_spec({"service": "s", "objectives": [entry]}).objectives[0]


@pytest.mark.parametrize(
    ("window", "factors"), [("30d", (14.4, 6)), ("28d", (13.44, 5.6)), ("7d", (3.36, 1.4))]
)
def test_factors_follow_the_window(window: str, factors: tuple[float, float]) -> None:
    legs = page_legs(objective("99.9%", window))
    assert tuple(leg.factor for leg in legs) == factors
    assert [leg.threshold_ratio for leg in legs] == [round(f * 0.001, 9) for f in factors]
    assert [leg.budget_share for leg in legs] == [0.02, 0.05]
    assert [(leg.long_seconds, leg.short_seconds) for leg in legs] == [(3600, 300), (21_600, 1800)]
    assert burn_notes(objective("99.9%", window)) == []


@pytest.mark.parametrize(
    ("target", "thresholds", "words"),
    [
        ("99%", (0.144, 0.06), []),
        ("95%", (0.525, 0.3), ["near total failure"]),  # it would need 72 %
        ("93%", (0.535, 0.42), ["can never fire"]),  # 93.06 % is where 14.4 stops
        ("90%", (0.55, 0.55), ["can never fire", "near total failure"]),
        ("50%", (0.75, 0.75), ["can never fire", "can never fire"]),
    ],
)
def test_a_leg_that_cannot_fire_is_lowered_and_says_so(
    target: str, thresholds: tuple[float, float], words: list[str]
) -> None:
    aim = objective(target)
    assert tuple(leg.threshold_ratio for leg in page_legs(aim)) == pytest.approx(thresholds)
    found = burn_notes(aim)
    assert len(found) == len(words)
    for note, word in zip(found, words, strict=True):
        assert word in note
        assert f"target of {target[:-1]} %" in note


@given(st.integers(50_000, 99_999), st.sampled_from(["7d", "28d", "30d"]))
def test_every_objective_can_page_and_pages_only_above_its_budget(target: int, window: str) -> None:
    aim = objective(f"{target / 1000}%", window)
    for leg in page_legs(aim):
        assert aim.budget_ratio < leg.threshold_ratio < 1
        assert leg.factor > 1
        assert leg.recovery_events * leg.threshold_ratio >= 3
        assert leg.note or leg.threshold_ratio == pytest.approx(
            leg.budget_share * aim.window_seconds / leg.long_seconds * aim.budget_ratio, abs=1e-8
        )

"""Values of a record that cannot be are refused one by one; sums of what is left stay finite."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.records import Outcome, RequestRecord, Source


def record(gaps: tuple[float, ...]) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        source=Source.PLUGIN,
        outcome=Outcome.COMPLETED,
        inter_token_seconds=gaps,
    )


@given(st.lists(st.floats(), max_size=50))
def test_gaps_that_are_left_lie_in_bounds_and_add_up(gaps: list[float]) -> None:
    subject = record(tuple(gaps))
    refused = subject.refuse_impossible(0.0)
    assert all(0.0 <= gap <= 86_400.0 for gap in subject.inter_token_seconds)
    assert math.isfinite(math.fsum(subject.inter_token_seconds))
    assert bool(refused) == (len(subject.inter_token_seconds) < len(gaps))


@pytest.mark.parametrize("gap", [1e308, math.inf, math.nan, -0.001, 86_400.5])
def test_an_impossible_gap_costs_only_itself(gap: float) -> None:
    subject = record((0.01, gap, 0.02))
    (refused,) = subject.refuse_impossible(0.0)
    assert (refused.name, refused.value) == ("inter_token_seconds", "1 gaps")
    assert subject.inter_token_seconds == (0.01, 0.02)

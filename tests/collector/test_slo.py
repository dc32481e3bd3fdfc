"""Budgets against cases worked out by hand, and counts against the verdicts they come from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.spec import Objective, Sli, default_spec
from servoscope.alerts.verdict import meets_all, verdict
from servoscope.collector.slo import budget, judge
from servoscope.exporters.records import Outcome, RequestRecord, Source

NOW = 1_800_000_000.0  # a whole minute
OBJECTIVES = tuple(default_spec().objectives)
TTFT = Objective(
    service="chat",
    name="ttft",
    sli=Sli.TIME_TO_FIRST_TOKEN,
    threshold_seconds=2.0,
    target_ratio=0.99,
    window_seconds=30 * 86_400,
)


def finished(at: float | None, seconds: float | None, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"outcome": Outcome.COMPLETED, "streaming": True}
    return RequestRecord(
        request_id="r",
        source=Source.PLUGIN,
        finished_unix_seconds=at,
        time_to_first_token_seconds=seconds,
        **(values | changes),
    )


@pytest.mark.parametrize(
    ("total", "good", "remaining"),
    [
        (1000, 1000, 1.0),  # nothing used
        (1000, 995, 0.5),  # 5 of the 10 that 1 % allows
        (1000, 990, 0.0),  # all used
        (1000, 980, -1.0),  # twice the budget
        (1, 0, -99.0),  # one request, and it was bad: 1 / 0.01 budgets
        (0, 0, None),  # no traffic, no promise
    ],
)
def test_remaining_budget(total: int, good: int, remaining: float | None) -> None:
    found = budget(TTFT, total=total, good=good, hour_total=0, hour_good=0)
    assert found.bad == total - good
    assert found.remaining_ratio == pytest.approx(remaining, abs=1e-12)
    assert found.burn_1h is None


@pytest.mark.parametrize(
    ("total", "good", "burn"),
    [(100, 100, 0.0), (100, 99, 1.0), (1000, 856, 14.4), (100, 0, 100.0)],
)
def test_burn_of_the_last_hour(total: int, good: int, burn: float) -> None:
    found = budget(TTFT, total=5000, good=4000, hour_total=total, hour_good=good)
    assert found.burn_1h == pytest.approx(burn)


@pytest.mark.parametrize("counts", [(1, 2, 0, 0), (1, -1, 0, 0), (5, 5, 1, 2)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int, int]) -> None:
    total, good, hour_total, hour_good = counts
    with pytest.raises(ValueError, match="good"):
        budget(TTFT, total=total, good=good, hour_total=hour_total, hour_good=hour_good)


def test_verdicts_are_counted_in_the_minute_of_the_end() -> None:
    records = [
        finished(NOW + 59.9, 1.0),
        finished(NOW + 60.0, 5.0),  # bad, and above 1.5 x 2 s
        finished(NOW + 61.0, 2.5),  # bad, not above
        finished(None, 1.0),  # no end seen: the minute of now
        finished(NOW, None, outcome=Outcome.CANCELLED, e2e_seconds=0.5),  # nobody can say
        finished(NOW, 1.0, outcome=Outcome.CLIENT_ERROR),  # left out
    ]
    found = judge([TTFT], records, NOW + 125)
    counts = {
        key[0] - NOW: (t.total, t.good, t.over, t.censored) for key, t in found.tallies.items()
    }
    assert counts == {0: (1, 1, 0, 1), 60: (2, 0, 1, 0), 120: (1, 1, 0, 0)}
    assert found.meets == [True, False, False, True, None, None]


record_values = st.builds(
    finished,
    st.none() | st.floats(NOW - 200, NOW),
    st.none() | st.floats(0, 10),
    outcome=st.sampled_from(Outcome),
    streaming=st.sampled_from([True, False, None]),
    time_per_output_token_seconds=st.none() | st.floats(0, 1),
    e2e_seconds=st.none() | st.floats(0, 200),
    output_tokens=st.none() | st.integers(0, 9),
    request_type=st.sampled_from(["chat", "probe"]),
)


@given(st.lists(record_values, max_size=30))
def test_counts_are_the_verdicts_added_up(records: list[RequestRecord]) -> None:
    found = judge(OBJECTIVES, records, NOW)
    assert found.meets == [meets_all(OBJECTIVES, record) for record in records]
    for objective in OBJECTIVES:
        verdicts = [verdict(objective, record) for record in records]
        tallies = [t for (_, _, name), t in found.tallies.items() if name == objective.name]
        assert sum(t.total for t in tallies) == sum(v.counted for v in verdicts)
        assert sum(t.good for t in tallies) == sum(v.good for v in verdicts)
        assert sum(t.over for t in tallies) == sum(v.over for v in verdicts)
        assert sum(t.censored for t in tallies) == sum(v.censored for v in verdicts)
        for t in tallies:
            assert t.good + t.over <= t.total

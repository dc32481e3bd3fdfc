"""Counters across restarts: never negative, never falling, resets told from faults."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.measure.totals import Totals

READINGS = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e9), max_size=3), max_size=30
)


@given(READINGS, st.lists(st.sampled_from([None, "one", "two"]), min_size=30, max_size=30))
def test_totals_never_fall_and_deltas_are_never_negative(
    readings: list[dict[str, float]], epochs: list[str | None]
) -> None:
    totals: Totals[str] = Totals()
    seen: dict[str, float] = {}
    for reading, epoch in zip(readings, epochs, strict=False):
        step = totals.observe(reading, epoch)
        assert all(delta >= 0 for delta in step.deltas.values())
        for key, total in totals.totals().items():
            assert total >= seen.get(key, 0.0)
            seen[key] = total


def test_the_first_reading_is_taken_as_it_is() -> None:
    totals: Totals[str] = Totals()
    step = totals.observe({"a": 40.0}, "one")
    assert (step.deltas, step.reset, totals.total("a")) == ({"a": 0.0}, False, 40.0)


def test_a_restart_counts_from_zero() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 40.0}, "one")
    step = totals.observe({"a": 5.0}, "two")
    assert step.reset
    assert step.deltas == {"a": 5.0}
    assert totals.total("a") == 45.0


def test_a_restart_is_seen_although_the_counter_is_higher_than_before() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 4.0}, "one")
    step = totals.observe({"a": 5.0}, "two")
    assert (step.reset, step.deltas) == (True, {"a": 5.0})


def test_a_fall_within_one_life_adds_nothing_and_is_reported() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 1_000_000.0}, "one")
    step = totals.observe({"a": 999_990.0}, "one")
    assert (step.deltas, step.fell, step.reset) == ({"a": 0.0}, ("a",), False)
    assert totals.observe({"a": 1_000_000.0}, "one").deltas == {"a": 10.0}
    assert totals.total("a") == 1_000_010.0


def test_a_fall_in_an_unknown_life_is_a_reset() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 10.0})
    step = totals.observe({"a": 3.0})
    assert step.reset
    assert totals.total("a") == 13.0


def test_a_label_that_appears_later_starts_at_zero() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 10.0}, "one")
    assert totals.observe({"a": 10.0, "b": 2.0}, "one").deltas["b"] == 2.0


def test_a_label_missing_after_a_restart_starts_at_zero_when_it_comes_back() -> None:
    totals: Totals[str] = Totals()
    totals.observe({"a": 10.0, "b": 7.0}, "one")
    totals.observe({"a": 1.0}, "two")
    step = totals.observe({"a": 1.0, "b": 3.0}, "two")
    assert step.deltas["b"] == 3.0
    assert totals.total("b") == 10.0


def test_keys_at_100_times_the_cap_are_bounded_and_known_ones_go_on() -> None:
    totals: Totals[int] = Totals(max_keys=100)
    for i in range(10_000):
        totals.observe({0: float(i), i + 1: 1.0}, "one")
    assert len(totals.totals()) == 100
    assert totals.total(0) == 9_999.0
    assert totals.ignored == 10_000 - 99

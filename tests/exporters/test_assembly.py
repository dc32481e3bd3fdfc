"""Arithmetic of readings and histograms, and every reason to refuse one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters import assembly
from servoscope.exporters.assembly import Assembly, Group, Part, Place, why_not
from servoscope.exporters.catalog import Kind
from servoscope.exporters.exposition import Series
from servoscope.exporters.records import HistogramReading
from servoscope.exporters.table import Line, Ranks

RUNNING = Line("r", "running", Kind.GAUGE, Ranks.SUM)
USAGE = Line("u", "kv_usage_ratio", Kind.GAUGE, Ranks.MAX)
COUNTER = Line("c", "preemptions_total", Kind.COUNTER, Ranks.SUM)
MILLISECONDS = Line("h_ms", "reported_e2e_seconds", Kind.HISTOGRAM, Ranks.SUM, factor=0.001)
EDGES = (0.1, 1.0, math.inf)


def never(values: Iterable[tuple[Series, float]]) -> float:
    raise AssertionError(f"not asked for: {list(values)}")


def put_histogram(
    run: Assembly, group: Group, owner: str, counts: Iterable[float], line: Line | None = None
) -> None:
    line = line or Line("h", group.signal, Kind.HISTOGRAM, Ranks.SUM)
    own = Group(owner, ())
    series = Series(owner, ())
    counts = list(counts)
    for edge, count in zip(EDGES, counts, strict=True):
        run.put(Place(line, group, Part.BUCKET, edge * line.factor, own), series, count)
    run.put(Place(line, group, Part.SUM, owner=own), series, 5.0)
    run.put(Place(line, group, Part.COUNT, owner=own), series, counts[-1])


@given(st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=8))
def test_ranks_are_summed_or_the_largest_is_taken(values: list[float]) -> None:
    run = Assembly(())
    one, other = Group("running", ()), Group("kv_usage_ratio", ())
    for value in values:
        run.put(Place(RUNNING, one), Series("r", ()), value)
        run.put(Place(USAGE, other), Series("u", ()), value)
    found = {r.name: r.value for r in run.readings(never)}
    assert found == {"running": math.fsum(values), "kv_usage_ratio": max(values)}


@pytest.mark.parametrize(
    ("line", "value", "why"),
    [
        (COUNTER, math.nan, "not a finite number"),
        (COUNTER, math.inf, "not a finite number"),
        (COUNTER, -math.inf, "not a finite number"),
        (COUNTER, -1.0, "negative counter"),
        (RUNNING, -1.0, "negative"),
        (USAGE, 1.01, "ratio above 1"),
        (USAGE, 1.0 + 1e-9, ""),
        (USAGE, 1.0, ""),
        (RUNNING, 500.0, ""),
        (COUNTER, 1e18, ""),
        (COUNTER, 1.01e18, "more than 1e+18"),
        (RUNNING, 1.7e308, "more than 1e+18"),
    ],
)
def test_values_that_cannot_be(line: Line, value: float, why: str) -> None:
    assert why_not(line, value) == why
    run = Assembly(())
    run.put(Place(line, Group(line.signal, ())), Series("engine:name", ()), value)
    assert bool(run.readings(never)) == (why == "")
    assert [(r.name, r.why) for r in run.refused] == ([("engine:name", why)] if why else [])
    assert line.signal in run.seen


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((1.0, 2.0, 3.0), ""),
        ((0.0, 0.0, 0.0), ""),
        ((2.0, 1.0, 3.0), "bucket counts fall with the edge"),
        ((1.0, math.nan, 3.0), "not a finite number"),
        ((-1.0, 2.0, 3.0), "negative counter"),
        ((1.0, 2.0, math.inf), "not a finite number"),
        ((1.0, 2.0, 1e308), "more than 1e+18"),
    ],
)
def test_histograms_that_cannot_be(counts: tuple[float, ...], why: str) -> None:
    run = Assembly(())
    put_histogram(run, Group("reported_e2e_seconds", ()), "engine:h", counts)
    found = run.histograms()
    assert bool(found) == (why == "")
    assert [(r.name, r.why) for r in run.refused] == ([("engine:h", why)] if why else [])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({Part.BUCKET, Part.SUM}, "without its sum, count or buckets"),
        ({Part.SUM, Part.COUNT}, "without its sum, count or buckets"),
        ({Part.BUCKET, Part.COUNT}, "without its sum, count or buckets"),
    ],
)
def test_histograms_with_a_part_missing(parts: set[str], why: str) -> None:
    run = Assembly(())
    group, own = Group("reported_e2e_seconds", ()), Group("engine:h", ())
    line = Line("h", group.signal, Kind.HISTOGRAM, Ranks.SUM)
    for part in parts:
        run.put(Place(line, group, part, math.inf, own), Series("engine:h", ()), 1.0)
    assert run.histograms() == ()
    assert why in run.refused[0].why


def test_a_histogram_needs_an_infinite_edge_and_its_count() -> None:
    group, own = Group("reported_e2e_seconds", ()), Group("engine:h", ())
    line = Line("h", group.signal, Kind.HISTOGRAM, Ranks.SUM)
    for edge, count, why in ((1.0, 1.0, "no +Inf bucket"), (math.inf, 2.0, "is not the count")):
        run = Assembly(())
        series = Series("engine:h", ())
        run.put(Place(line, group, Part.BUCKET, edge, own), series, 1.0)
        run.put(Place(line, group, Part.SUM, owner=own), series, 1.0)
        run.put(Place(line, group, Part.COUNT, owner=own), series, count)
        assert run.histograms() == ()
        assert why in run.refused[0].why


@given(st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3), min_size=1, max_size=5))
def test_histograms_of_one_group_are_added(increments: list[list[int]]) -> None:
    run = Assembly(())
    group = Group("reported_e2e_seconds", (("rank", "0"),))
    for number, steps in enumerate(increments):
        counts = [float(sum(steps[: i + 1])) for i in range(3)]
        put_histogram(run, group, f"engine:h{number}", counts)
    (found,) = run.histograms()
    total = [sum(column) for column in zip(*increments, strict=True)]
    assert found.buckets == tuple(
        (edge, float(sum(total[: i + 1]))) for i, edge in enumerate(EDGES)
    )
    assert found.count == found.buckets[-1][1]
    assert found.sum == 5.0 * len(increments)
    assert found.labels == (("rank", "0"),)


def test_histograms_with_unlike_edges_are_not_added() -> None:
    run = Assembly(())
    group = Group("reported_e2e_seconds", ())
    put_histogram(run, group, "engine:h", (1.0, 2.0, 3.0))
    line, own = Line("h", group.signal, Kind.HISTOGRAM, Ranks.SUM), Group("engine:h2", ())
    for part in (Part.BUCKET, Part.SUM, Part.COUNT):
        run.put(Place(line, group, part, math.inf, own), Series("engine:h2", ()), 7.0)
    (found,) = run.histograms()
    assert found.count == 3.0
    assert "unlike edges" in run.refused[0].why


def test_units_are_converted_edges_too() -> None:
    run = Assembly(())
    group = Group("reported_e2e_seconds", ())
    put_histogram(run, group, "engine:h_ms", (1.0, 2.0, 3.0), MILLISECONDS)
    assert run.histograms() == (
        HistogramReading(
            "reported_e2e_seconds", ((0.0001, 1.0), (0.001, 2.0), (math.inf, 3.0)), 0.005, 3.0
        ),
    )


def test_a_sum_with_a_part_missing_is_no_reading() -> None:
    group = Group("engine_prompt_tokens_total", ())
    lines = [Line(n, group.signal, Kind.COUNTER, Ranks.SUM, addends=2) for n in ("a", "b")]
    both = Assembly(())
    for line in lines:
        both.put(Place(line, group), Series(line.name, ()), 3.0)
    assert [r.value for r in both.readings(never)] == [6.0]
    one = Assembly(())
    one.put(Place(lines[0], group), Series("a", ()), 3.0)
    assert one.readings(never) == ()
    assert group.signal not in one.seen


def test_everything_is_bounded() -> None:
    run = Assembly(())
    for number in range(assembly.MAX_READINGS + 10):
        run.put(Place(RUNNING, Group("running", (("rank", str(number)),))), Series("r", ()), 1.0)
    run.put(Place(USAGE, Group("kv_usage_ratio", ())), Series("u", ()), 0.5)
    for number in range(assembly.MAX_HISTOGRAMS + 10):
        put_histogram(run, Group("reported_e2e_seconds", (("rank", str(number)),)), f"h{number}",
                      (1, 1, 1))  # fmt: skip
    readings = run.readings(never)
    assert len(readings) == assembly.MAX_READINGS + 1
    assert readings[-1].name == "kv_usage_ratio"  # what comes after the flood is not lost
    assert len(run.histograms()) == assembly.MAX_HISTOGRAMS
    assert [r.value for r in run.refused] == ["running", "reported_e2e_seconds"]
    assert all("the rest was left out" in r.why for r in run.refused)
    for _ in range(1_000):
        run.refuse("a", "b" * 1_000, "c")
    assert len(run.refused) == assembly.MAX_REFUSED
    assert max(len(r.value) for r in run.refused) <= 64

"""The fine histogram keeps its promise on the error, adds up, and stays small."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.catalog import LATENCY_BUCKETS_SECONDS
from servoscope.sidecar.measure.histogram import (
    MAX_PARTS,
    RELATIVE_ERROR,
    ClassicCounts,
    FineHistogram,
)

VALUES = st.lists(st.floats(1e-6, 1e8, allow_nan=False), min_size=1, max_size=200)


def exact(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def test_the_promised_error_is_within_the_requirement() -> None:
    assert RELATIVE_ERROR <= 0.025


@given(VALUES, st.floats(0.0, 1.0))
def test_quantiles_are_within_the_promised_error(values: list[float], q: float) -> None:
    histogram = FineHistogram()
    for value in values:
        histogram.observe(value)
    found = histogram.quantile(q)
    assert found is not None
    assert found == pytest.approx(exact(values, q), rel=RELATIVE_ERROR + 1e-12)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99, 0.999])
def test_quantiles_of_long_tails(q: float) -> None:
    rng = random.Random(7)
    values = [rng.lognormvariate(-1.5, 1.3) for _ in range(20_000)]
    histogram = FineHistogram()
    for value in values:
        histogram.observe(value)
    assert histogram.quantile(q) == pytest.approx(exact(values, q), rel=0.025)


@given(VALUES, VALUES)
def test_merging_is_observing_all(left: list[float], right: list[float]) -> None:
    one, two, both = FineHistogram(), FineHistogram(), FineHistogram()
    for value in left:
        one.observe(value)
        both.observe(value)
    for value in right:
        two.observe(value)
        both.observe(value)
    one.merge(two)
    assert one.count == both.count
    assert one.total == pytest.approx(both.total)
    for q in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert one.quantile(q) == both.quantile(q)


def test_it_is_bounded_whatever_comes() -> None:
    histogram = FineHistogram()
    rng = random.Random(3)
    for _ in range(100 * MAX_PARTS):
        histogram.observe(10.0 ** rng.uniform(-300, 300))
    assert len(histogram) <= MAX_PARTS


def test_edges_of_the_range() -> None:
    histogram = FineHistogram()
    assert histogram.quantile(0.5) is None
    for value in (0.0, 5e-324, 1e300):
        histogram.observe(value)
    assert histogram.quantile(0.0) == 0.0
    assert (histogram.minimum, histogram.maximum, histogram.count) == (0.0, 1e300, 3)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -0.1])
def test_impossible_values_are_refused_and_nothing_is_lost(value: float) -> None:
    histogram = FineHistogram()
    histogram.observe(1.0)
    with pytest.raises(ValueError, match="finite values"):
        histogram.observe(value)
    assert histogram.count == 1


def test_a_quantile_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        FineHistogram().quantile(1.5)


@given(st.lists(st.floats(0.0, 1e4), max_size=100))
def test_classic_counts_are_exact(values: list[float]) -> None:
    counts = ClassicCounts(LATENCY_BUCKETS_SECONDS)
    for value in values:
        counts.observe(value)
    for edge, found in zip((*LATENCY_BUCKETS_SECONDS, math.inf), counts.cumulative(), strict=True):
        assert found == sum(1 for value in values if value <= edge)
    assert counts.count == len(values)

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest

from servoscope.sidecar.wire.clock import StepWatch, read_clocks


def test_step_is_reported_once_and_slewing_never() -> None:
    watch = StepWatch(wall=1000.0, steady=10.0)
    assert watch.offset == 990.0
    assert watch.look(1001.0005, 11.0) == 0.0  # slewed by half a millisecond
    assert watch.offset == pytest.approx(990.0005)
    assert watch.look(1000.0 + 3602.0, 12.0) == pytest.approx(3600.0, abs=0.001)
    assert watch.look(1000.0 + 3603.0, 13.0) == 0.0
    assert watch.look(1000.0 + 4.0, 14.0) == pytest.approx(-3600.0)


def test_slow_drift_never_becomes_a_step() -> None:
    watch = StepWatch(0.0, 0.0)
    for second in range(1, 10_000):
        assert watch.look(second * 1.0005, float(second)) == 0.0
    assert watch.offset == pytest.approx(5.0, abs=0.01)


def sequence(values: Iterable[float]) -> Callable[[], float]:
    return iter(values).__next__


def test_the_tightest_reading_wins() -> None:
    """Being descheduled between the two clocks must not look like a step of the wall clock."""
    steady = sequence([0.0, 5.0, 5.0, 5.000_01])
    wall, at = read_clocks(sequence([100.0, 105.0]), steady)
    assert wall == 105.0
    assert at == pytest.approx(5.000_005)


def test_real_clocks() -> None:
    wall, steady = read_clocks()
    assert abs((wall - steady) - (time.time() - time.monotonic())) < 1.0

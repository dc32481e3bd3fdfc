"""Wall-clock stamps whose differences survive a step of the wall clock (NTP, resume, `date -s`)."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StepWatch", "read_clocks"]

_TIGHT_SECONDS = 0.000_1
_TRIES = 8


class StepWatch:
    """Follows the difference between wall clock and monotonic clock.

    Slewing (NTP: at most 0.5 ms a second) only moves ``offset``; a change above ``threshold``
    seconds between two looks is a step, and whoever holds stamps of before must shift them by it.
    """

    def __init__(self, wall: float, steady: float, threshold: float = 0.1) -> None:
        self.offset = wall - steady
        self._threshold = threshold

    def look(self, wall: float, steady: float) -> float:
        """Seconds by which the wall clock was stepped since the last look; 0.0 for none."""
        change = wall - steady - self.offset
        self.offset += change
        return change if abs(change) > self._threshold else 0.0


def read_clocks(
    wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
) -> tuple[float, float]:
    """Both clocks at (nearly) the same moment: being descheduled in between looks like a step."""
    best: tuple[float, float, float] | None = None
    for _ in range(_TRIES):
        before = steady()
        now = wall()
        spent = steady() - before
        if best is None or spent < best[0]:
            best = (spent, now, before + spent / 2)
        if spent < _TIGHT_SECONDS:
            break
    if best is None:
        raise RuntimeError("no clock was read")
    return best[1], best[2]

"""Which time retention may go by. Pure: readings of clocks in, two bounds out.

A wall clock can jump by years (a dead battery, a wrong time server, a hand). Records that are
deleted by such a clock are gone for good, so a jump is not acted on until the clock has stood by
it for a day: until then what is deleted for its age is old by the earlier of the two clocks, and
what is deleted because it lies ahead of us is ahead of the later one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_AHEAD_SECONDS", "SETTLE_SECONDS", "STEP_SECONDS", "Clocks", "Span"]

STEP_SECONDS = 86_400.0  # a smaller difference is a correction, or this host was asleep
GAP_SECONDS = 7 * 86_400.0  # without a collector, before one that starts doubts its clock
SETTLE_SECONDS = 86_400.0  # so long a new time must hold before it is believed
MAX_AHEAD_SECONDS = 86_400.0  # rows further ahead came while the clock was wrong


@dataclass(frozen=True, slots=True)
class Span:
    """Now is between these two, in unix seconds; equal when the clock is believed."""

    earliest: float
    latest: float

    @property
    def doubtful(self) -> bool:
        """Whether the clock has jumped and has not stood by it for long enough."""
        return self.earliest != self.latest


@dataclass(frozen=True, slots=True)
class _Reading:
    """Wall clock and monotonic clock of one moment, seconds."""

    wall: float
    monotonic: float

    def wall_at(self, monotonic: float) -> float:
        """What the wall clock shows then if nobody sets it."""
        return self.wall + (monotonic - self.monotonic)


class Clocks:
    """Follows a wall clock by a monotonic one."""

    def __init__(self) -> None:
        self._believed: _Reading | None = None
        self._doubted: _Reading | None = None

    def now(self, wall: float, monotonic: float, newest_unix_seconds: float | None) -> Span:
        """Now, from both clocks.

        Args:
            wall: unix seconds.
            monotonic: seconds of a clock that nobody sets.
            newest_unix_seconds: the wall clock when something was stored last, by an earlier
                process perhaps; ``None``: never.
        """
        reading = _Reading(wall, monotonic)
        if self._believed is None:
            jumped = (
                newest_unix_seconds is not None and abs(wall - newest_unix_seconds) > GAP_SECONDS
            )
            start = newest_unix_seconds if jumped and newest_unix_seconds is not None else wall
            self._believed = _Reading(start, monotonic)
        expected = self._believed.wall_at(monotonic)
        if abs(wall - expected) <= STEP_SECONDS:
            self._believed, self._doubted = reading, None
            return Span(wall, wall)
        doubted = self._doubted
        if doubted is None or abs(wall - doubted.wall_at(monotonic)) > STEP_SECONDS:
            self._doubted = reading  # it jumped now, or jumped again
        elif monotonic - doubted.monotonic >= SETTLE_SECONDS:
            self._believed, self._doubted = reading, None
            return Span(wall, wall)
        return Span(min(wall, expected), max(wall, expected))

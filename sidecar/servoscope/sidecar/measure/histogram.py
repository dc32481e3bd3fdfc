"""Histograms: a fine one to read quantiles from, and the fixed classic grid that is published.

``FineHistogram`` is log-linear: every power of two is cut into 32 equal parts, so a value read back
as the middle of its part is wrong by at most 1/64 (1.6 %) of itself. It holds at most
``MAX_PARTS`` counters whatever is observed, and two of them add up exactly.

``ClassicCounts`` counts on given upper edges, exactly (never derived from the fine parts, whose
borders lie elsewhere). Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

__all__ = ["MAX_PARTS", "RELATIVE_ERROR", "ClassicCounts", "FineHistogram"]

_PARTS_PER_OCTAVE = 32
_LOWEST_EXPONENT = -20  # 2**-21 s, about half a microsecond: below it a value counts as "tiny"
_HIGHEST_EXPONENT = 28  # 2**28 tokens or seconds: above it a value counts in the last part
_FIRST = _LOWEST_EXPONENT * _PARTS_PER_OCTAVE
_LAST = (_HIGHEST_EXPONENT + 1) * _PARTS_PER_OCTAVE - 1

MAX_PARTS = _LAST - _FIRST + 2  # one more for tiny values
RELATIVE_ERROR = 1 / (2 * _PARTS_PER_OCTAVE)  # of a quantile against the exact order statistic

_TINY = _FIRST - 1


def _part_of(value: float) -> int:
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2**exponent, 0.5 <= mantissa < 1
    part = exponent * _PARTS_PER_OCTAVE + int((mantissa - 0.5) * (2 * _PARTS_PER_OCTAVE))
    if part < _FIRST or value <= 0.0:
        return _TINY
    return min(part, _LAST)


def _middle_of(part: int) -> float:
    exponent, step = divmod(part, _PARTS_PER_OCTAVE)
    return math.ldexp(0.5 + (step + 0.5) / (2 * _PARTS_PER_OCTAVE), exponent)


class FineHistogram:
    """Counts of non-negative values with a relative error of at most 1.6 %, mergeable, bounded."""

    __slots__ = ("_parts", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self._parts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf

    def __len__(self) -> int:
        """How many parts hold something; never more than ``MAX_PARTS``."""
        return len(self._parts)

    def observe(self, value: float) -> None:
        """Count one value. Raises ValueError unless it is finite and not negative."""
        if not 0.0 <= value < math.inf:
            msg = f"a histogram takes finite values from 0 up, not {value!r}"
            raise ValueError(msg)
        part = _part_of(value)
        self._parts[part] = self._parts.get(part, 0) + 1
        self.count += 1
        self.total += value
        if value < self.minimum:  # noqa: PLR1730 - the hot path: min() costs three times as much
            self.minimum = value
        if value > self.maximum:  # noqa: PLR1730
            self.maximum = value

    def merge(self, other: FineHistogram) -> None:
        """Add what ``other`` counted; the result is as if all had been observed here."""
        for part, n in other._parts.items():
            self._parts[part] = self._parts.get(part, 0) + n
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def quantile(self, q: float) -> float | None:
        """The value of rank ceil(q * count), or ``None`` when nothing was observed.

        Raises ValueError unless 0 <= q <= 1.
        """
        if not 0.0 <= q <= 1.0:
            msg = f"a quantile lies in 0..1, not {q!r}"
            raise ValueError(msg)
        if self.count == 0:
            return None
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for part in sorted(self._parts):
            seen += self._parts[part]
            if seen >= rank:
                middle = self.minimum if part == _TINY else _middle_of(part)
                return min(max(middle, self.minimum), self.maximum)
        return self.maximum


class ClassicCounts:
    """Counts on fixed upper edges (the last, +Inf, is implied), as Prometheus has them."""

    __slots__ = ("_counts", "count", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self._counts = [0] * (len(edges) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; it belongs to the first edge that is not below it."""
        self._counts[bisect_left(self.edges, value)] += 1
        self.count += 1
        self.total += value

    def cumulative(self) -> Iterable[int]:
        """Counts at or below each edge, the last one is the count of all."""
        running = 0
        for n in self._counts:
            running += n
            yield running

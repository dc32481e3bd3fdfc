"""Counts of prompt and output lengths on one fixed grid: what drift is judged on.

Bucket ``i`` holds the whole numbers n with 2^(i/4) <= n < 2^((i+1)/4): four buckets an octave from
1 to 2^20 tokens, 80 in all, 19 % wide but for rounding to whole numbers. Length 0 counts in bucket
0, 2^20 and more in the last. No whole number falls into buckets 1, 2, 3, 5 and 7.
Counts on one grid can be added over engines and hours; quantile sketches cannot be compared so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BUCKETS", "EDGES", "LengthCounts", "Side", "Stream", "bucket_of"]

BUCKETS = 80
MAX_STREAMS = 512

Side = Literal["input", "output"]


def _edge(index: int) -> int:
    """The smallest whole number n with n^4 >= 2^index; floats would misplace exact powers."""
    floor = 1 << (index // 4)
    low, high = floor, 2 * floor
    while low < high:
        middle = (low + high) // 2
        if middle**4 >= 1 << index:
            high = middle
        else:
            low = middle + 1
    return low


#: Lowest length of each bucket. A bucket whose edge equals the next one's is empty.
EDGES: tuple[int, ...] = tuple(_edge(i) for i in range(BUCKETS))


def bucket_of(tokens: int) -> int:
    """Bucket of a length, 0 .. BUCKETS - 1. Raises ValueError below zero."""
    if tokens < 0:
        raise ValueError(f"a length of {tokens} tokens")
    return max(0, bisect_right(EDGES, tokens) - 1)


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """One series of lengths that is judged on its own."""

    model_version: str
    request_type: str
    side: Side


@dataclass(slots=True)
class LengthCounts:
    """Counts by stream and bucket, at most ``max_streams`` streams; what did not fit is counted."""

    max_streams: int = MAX_STREAMS
    omitted: int = 0
    _counts: dict[Stream, list[int]] = field(default_factory=dict)

    def add(self, stream: Stream, bucket: int, count: int = 1) -> None:
        """Add ``count`` requests whose length falls in ``bucket``."""
        if not 0 <= bucket < BUCKETS:
            raise ValueError(f"bucket {bucket} is outside 0..{BUCKETS - 1}")
        if count < 0:
            raise ValueError(f"a count of {count}")
        counts = self._counts.get(stream)
        if counts is None:
            if len(self._counts) >= self.max_streams:
                self.omitted += count
                return
            counts = self._counts[stream] = [0] * BUCKETS
        counts[bucket] += count

    def add_all(self, rows: Iterable[tuple[Stream, int, int]]) -> None:
        """Add (stream, bucket, count) rows."""
        for stream, bucket, count in rows:
            self.add(stream, bucket, count)

    def merge(self, other: LengthCounts) -> None:
        """Add another set of counts to this one."""
        for stream, counts in other._counts.items():
            for bucket, count in enumerate(counts):
                if count:
                    self.add(stream, bucket, count)
        self.omitted += other.omitted

    def streams(self) -> list[tuple[Stream, tuple[int, ...]]]:
        """Every stream with its counts by bucket, in the order of their names."""
        return [(stream, tuple(counts)) for stream, counts in sorted(self._counts.items())]

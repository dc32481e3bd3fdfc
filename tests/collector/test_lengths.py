"""Length counts on the fixed grid."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.collector.lengths import BUCKETS, EDGES, LengthCounts, Stream, bucket_of
from servoscope.collector.rows import buckets

CHAT = Stream("v1", "chat", "input")


@given(st.integers(1, 2**20 - 1))
def test_a_bucket_holds_the_lengths_of_its_quarter_octave(tokens: int) -> None:
    bucket = bucket_of(tokens)
    # 2^(bucket/4) <= tokens < 2^((bucket+1)/4), in whole numbers
    assert 1 << bucket <= tokens**4 < 1 << (bucket + 1)
    assert EDGES[bucket] <= tokens


def test_the_ends_of_the_grid() -> None:
    assert [bucket_of(n) for n in (0, 1, 2, 3, 4, 2**19)] == [0, 0, 4, 6, 8, 76]
    assert bucket_of(2**20) == bucket_of(10**8) == BUCKETS - 1
    with pytest.raises(ValueError, match="-1 tokens"):
        bucket_of(-1)


def test_no_bucket_is_wider_than_19_percent() -> None:
    wide = [b / a for a, b in pairwise(EDGES) if a >= 1024]
    assert max(wide) < 1.191
    assert list(EDGES) == sorted(EDGES)
    assert len(EDGES) == BUCKETS == 80


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=50))
def test_the_store_uses_the_same_grid(tokens: list[int]) -> None:
    found = buckets(np.array([*tokens, np.nan]))
    assert found[:-1].tolist() == [bucket_of(n) for n in tokens]
    assert np.isnan(found[-1])


def test_counts_add_and_merge() -> None:
    one, two = LengthCounts(), LengthCounts()
    one.add(CHAT, 3, 2)
    two.add_all([(CHAT, 3, 5), (CHAT, 4, 1)])
    one.merge(two)
    ((stream, counts),) = one.streams()
    assert stream == CHAT
    assert (counts[3], counts[4], sum(counts)) == (7, 1, 8)


def test_streams_are_bounded_at_a_hundred_times_the_cap() -> None:
    counts = LengthCounts(max_streams=5)
    for number in range(500):
        counts.add(Stream("v", f"type-{number}", "output"), 0, 2)
    assert len(counts.streams()) == 5
    assert counts.omitted == 2 * 495


@pytest.mark.parametrize(("bucket", "count"), [(-1, 1), (BUCKETS, 1), (0, -1)])
def test_impossible_counts_are_refused(bucket: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"bucket|count"):
        LengthCounts().add(CHAT, bucket, count)

"""gzip undone piece by piece, and never beyond a bound."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.packed import Packed, PackedError, unpacked

LIMIT = 1_000_000


@given(st.binary(max_size=5_000), st.lists(st.integers(1, 500), max_size=20))
def test_pieces_of_any_size_give_the_whole(data: bytes, sizes: list[int]) -> None:
    packed, source, out = Packed(LIMIT), gzip.compress(data), b""
    for size in [*sizes, len(source)]:
        out += packed.feed(source[:size])
        source = source[size:]
    packed.finish()
    assert out == data


@given(st.binary(max_size=200).filter(lambda d: not d.startswith(b"\x1f\x8b")))
def test_what_is_not_gzip_stays_as_it_is(data: bytes) -> None:
    assert unpacked(data, LIMIT) == (data, "")


def test_files_one_after_the_other_and_padding() -> None:
    data = gzip.compress(b"a 1\n") + gzip.compress(b"b 2\n") + b"\0" * 100
    assert unpacked(data, LIMIT) == (b"a 1\nb 2\n", "")


@pytest.mark.parametrize(
    ("data", "kept", "why"),
    [
        (gzip.compress(b"a 1\n" * 1_000)[:-9], b"a 1\n", "cut off"),
        (gzip.compress(b"a 1\n")[:-4] + b"\1\1\1\1", b"", "damaged"),
        (gzip.compress(b"a 1\n") + b"tail", b"a 1\n", "damaged"),
        (b"\x1f\x8b", b"", "cut off"),
        (b"\x1f\x8bnonsense", b"", "damaged"),
    ],
)
def test_damage_is_said_and_what_came_before_it_is_kept(data: bytes, kept: bytes, why: str) -> None:
    out, said = unpacked(data, LIMIT)
    assert why in said
    assert out.startswith(kept)


def test_a_bound_is_exact() -> None:
    data = gzip.compress(b"x" * 1_000)
    assert unpacked(data, 1_000) == (b"x" * 1_000, "")
    assert unpacked(data, 999)[1] == "gzip holds more than 999 bytes"


def test_a_bomb_costs_no_more_than_the_bound() -> None:
    maker = zlib.compressobj(9, wbits=31)
    million = b"\0" * 1_000_000
    bomb = b"".join(maker.compress(million) for _ in range(300)) + maker.flush()
    assert len(bomb) < LIMIT  # 300 MB within
    tracemalloc.start()
    out, why = unpacked(bomb, LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "more than" in why
    assert out == b"\0" * LIMIT
    assert peak < 8 * LIMIT


def test_after_the_bound_nothing_more_comes() -> None:
    packed = Packed(10)
    data = gzip.compress(b"x" * 1_000)
    with pytest.raises(PackedError, match="more than 10 bytes"):
        packed.feed(data)

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.wire.coding import CodingError, inflater_for
from sidecar.wire.talk import pieces


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


CODINGS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"x-gzip": gzip.compress,
}


@pytest.mark.parametrize("coding", [b"gzip", b" GZIP ", b"deflate", b"raw"])
@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_any_split_decodes_to_the_same(coding: bytes, data: bytes, cuts: list[int]) -> None:
    pack = raw_deflate if coding == b"raw" else CODINGS[coding.strip().lower()]
    inflater = inflater_for(b"deflate" if coding == b"raw" else coding, 10_000)
    assert inflater is not None
    out = b"".join(b"".join(inflater.feed(piece)) for piece in pieces(pack(data), cuts))
    assert out == data


def test_flushed_data_come_out_at_once() -> None:
    packer = zlib.compressobj(wbits=31)
    inflater = inflater_for(b"gzip", 1000)
    assert inflater is not None
    for text in (b"data: a\n\n", b"data: b\n\n"):
        packed = packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(inflater.feed(packed)) == text


def test_several_gzip_members_and_padding() -> None:
    inflater = inflater_for(b"gzip", 1000)
    assert inflater is not None
    data = gzip.compress(b"one") + gzip.compress(b"two") + bytes(8)
    assert b"".join(inflater.feed(data)) == b"onetwo"


def test_identity_needs_no_inflater() -> None:
    assert inflater_for(b"", 10) is None
    assert inflater_for(b"Identity", 10) is None


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br", b"\xff"])
def test_unknown_coding_is_named_as_unsupported(coding: bytes) -> None:
    with pytest.raises(CodingError, match="not supported"):
        inflater_for(coding, 10)


def test_bomb_is_stopped_at_its_bound() -> None:
    inflater = inflater_for(b"gzip", 1_000_000)
    assert inflater is not None
    bomb = gzip.compress(bytes(50_000_000))
    seen: list[int] = []
    with pytest.raises(CodingError, match="beyond its bound"):
        seen.extend(len(piece) for piece in inflater.feed(bomb))
    assert 0 < sum(seen) <= 1_000_000


@given(st.binary(min_size=2, max_size=200), st.sampled_from([b"gzip", b"deflate"]))
def test_garbage_raises_only_the_named_error(data: bytes, coding: bytes) -> None:
    inflater = inflater_for(coding, 1000)
    assert inflater is not None
    try:
        out = b"".join(inflater.feed(data))
    except CodingError:
        return
    assert len(out) <= 1000

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.tap.ring import frames


def block(packets: list[tuple[int, int, bytes]], network: int = 64) -> bytes:
    """A TPACKET_V3 block: (seconds, nanoseconds, packet)."""
    body = b""
    for n, (seconds, nanoseconds, data) in enumerate(packets):
        size = network + len(data)
        size += -size % 16
        following = size if n < len(packets) - 1 else 0
        head = struct.pack(
            "IIIIIIHH", following, seconds, nanoseconds, len(data), len(data), 0, network, network
        )
        body += (head.ljust(network, b"\0") + data).ljust(size, b"\0")
    return struct.pack("IIIIII", 1, 48, 1, len(packets), 48, 48 + len(body)).ljust(48, b"\0") + body


def test_frames_of_a_block() -> None:
    data = block([(100, 500_000_000, b"one"), (101, 0, b"second")])
    found = [(data[at : at + size], when) for at, size, when in frames(data)]
    assert found == [(b"one", 100.5), (b"second", 101.0)]


def test_empty_block() -> None:
    assert list(frames(block([]))) == []
    assert list(frames(b"")) == []


def test_cut_block_ends_early() -> None:
    data = block([(1, 0, b"x" * 100), (2, 0, b"y" * 100)])
    assert [size for _, size, _ in frames(data[:-60])] == [100]


@given(st.binary(max_size=300), st.integers(0, 400))
def test_garbage_stays_within_its_bytes(noise: bytes, cut: int) -> None:
    data = (block([(1, 0, b"abc")] * 3) + noise)[cut:]
    for at, size, _ in frames(data):
        assert 0 <= at <= at + size <= len(data)

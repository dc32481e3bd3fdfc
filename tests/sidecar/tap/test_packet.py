from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.tap.packet import ACK, Segment, parse_packet
from sidecar.tap.segments import CLIENT, SERVER, ipv4, ipv6, tcp

SEGMENT = Segment(CLIENT, 40_000, SERVER, 8000, 4_000_000_000, 17, ACK, b"hello")
V6 = SEGMENT._replace(source=bytes(15) + b"\x01", destination=bytes(15) + b"\x01")


def parse(packet: bytes) -> Segment | None:
    return parse_packet(packet, 0, len(packet))


def test_ipv4() -> None:
    assert parse(ipv4(tcp(SEGMENT))) == SEGMENT
    assert parse(ipv4(tcp(SEGMENT, options=b"\x01" * 12))) == SEGMENT


def test_ipv4_options_and_trailing_link_padding() -> None:
    payload = tcp(SEGMENT)
    packet = ipv4(bytes(4) + payload, version=0x46)
    assert parse(packet + b"padding") == SEGMENT


def test_ipv6_with_and_without_extension_headers() -> None:
    assert parse(ipv6(tcp(V6))) == V6
    hop = b"\x3c\x00" + bytes(6)  # hop-by-hop, then destination options
    destination = b"\x06\x01" + bytes(14)
    assert parse(ipv6(tcp(V6), following=0, extensions=hop + destination)) == V6


def test_offset_into_a_block() -> None:
    packet = ipv4(tcp(SEGMENT))
    assert parse_packet(b"x" * 7 + packet + b"y" * 9, 7, len(packet)) == SEGMENT


def test_longer_than_64_kib_says_length_zero() -> None:
    big = SEGMENT._replace(payload=b"z" * 70_000)
    assert parse(ipv4(tcp(big), total=0)) == big


def test_payload_cut_by_the_capture_is_returned_as_far_as_it_goes() -> None:
    packet = ipv4(tcp(SEGMENT))
    assert parse_packet(packet, 0, len(packet) - 2) == SEGMENT._replace(payload=b"hel")


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x45",
        ipv4(tcp(SEGMENT), protocol=17),
        ipv4(tcp(SEGMENT), fragment=0x2000),
        ipv4(tcp(SEGMENT), fragment=0x0010),
        ipv4(tcp(SEGMENT), version=0x43),
        ipv4(tcp(SEGMENT)[:12]),
        ipv4(tcp(SEGMENT)[:12] + b"\x10" + tcp(SEGMENT)[13:]),
        ipv4(tcp(SEGMENT)[:12] + b"\xf0" + tcp(SEGMENT)[13:]),
        ipv6(tcp(V6))[:39],
        ipv6(tcp(V6), following=58),
        ipv6(tcp(V6), following=0, extensions=b""),
        b"\x95" + bytes(60),
    ],
)
def test_what_is_no_tcp_segment_is_none(packet: bytes) -> None:
    assert parse(packet) is None


@given(st.binary(max_size=120))
def test_garbage_never_raises(data: bytes) -> None:
    for first in (b"", b"\x45", b"\x60"):
        found = parse(first + data)
        assert found is None or len(found.payload) <= len(data)

"""One captured IP packet as a TCP segment. Pure.

Frames come from a "cooked" packet socket (SOCK_DGRAM): the kernel has taken the link header off,
so loopback, Ethernet, VLAN, veth and tunnel devices look alike: the IP header comes first.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["ACK", "FIN", "RST", "SYN", "Segment", "parse_packet"]

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

_TCP = 6
_IPV6_HEADER = 40
#: Extension headers that may stand before TCP: hop-by-hop, routing, destination options.
_IPV6_EXTENSIONS = (0, 43, 60)
_MAX_EXTENSIONS = 8

_new = tuple.__new__
_tcp_header = struct.Struct("!HHIIBB").unpack_from
_TCP_MINIMUM = 20


class Segment(NamedTuple):
    """Addresses are packed (4 or 16 bytes)."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int
    sequence: int
    acknowledged: int
    flags: int
    payload: bytes


def parse_packet(data: bytes, start: int, size: int) -> Segment | None:
    """The TCP segment in ``data[start:start + size]``; None for all that is none.

    Also None for a fragment, and for a header that does not fit in what was captured. A payload cut
    by the capture is returned as far as it goes: the hole behind it shows in the sequence numbers.
    """
    end = start + size
    if size < _TCP_MINIMUM:
        return None
    version = data[start] >> 4
    if version == 4:
        return _parse_ipv4(data, start, end)
    return _parse_ipv6(data, start, end) if version == 6 else None


def _parse_ipv4(data: bytes, start: int, end: int) -> Segment | None:
    header = (data[start] & 0x0F) * 4
    fragment = (data[start + 6] << 8 | data[start + 7]) & 0x3FFF  # "more" bit and offset
    if data[start + 9] != _TCP or fragment or header < 20:
        return None
    # A total length of 0 is "BIG TCP": longer than 64 KiB, then the captured size is the length.
    total = data[start + 2] << 8 | data[start + 3]
    if total:
        end = min(end, start + total)
    return _parse_tcp(
        data, start + header, end, data[start + 12 : start + 16], data[start + 16 : start + 20]
    )


def _parse_ipv6(data: bytes, start: int, end: int) -> Segment | None:
    if end - start < _IPV6_HEADER:
        return None
    length = data[start + 4] << 8 | data[start + 5]
    if length:  # 0: a jumbogram
        end = min(end, start + _IPV6_HEADER + length)
    following = data[start + 6]
    at = start + _IPV6_HEADER
    for _ in range(_MAX_EXTENSIONS):
        if following not in _IPV6_EXTENSIONS or at + 8 > end:
            break
        following, at = data[at], at + (data[at + 1] + 1) * 8
    if following != _TCP:
        return None
    return _parse_tcp(data, at, end, data[start + 8 : start + 24], data[start + 24 : start + 40])


def _parse_tcp(data: bytes, at: int, end: int, source: bytes, destination: bytes) -> Segment | None:
    if end - at < _TCP_MINIMUM:
        return None
    source_port, destination_port, sequence, acknowledged, offset, flags = _tcp_header(data, at)
    payload = at + (offset >> 4) * 4
    if payload < at + _TCP_MINIMUM or payload > end:
        return None
    fields = (
        source,
        source_port,
        destination,
        destination_port,
        sequence,
        acknowledged,
        flags,
        data[payload:end],
    )
    return _new(Segment, fields)  # half the time of Segment(*fields), and every packet comes here

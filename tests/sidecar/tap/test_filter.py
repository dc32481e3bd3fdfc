from __future__ import annotations

import struct

import pytest

from servoscope.sidecar.tap.filter import assemble, port_filter
from servoscope.sidecar.tap.packet import ACK, Segment
from sidecar.tap.segments import CLIENT, PORT, SERVER, ipv4, ipv6, tcp

LOOPBACK = 1
OUTGOING, INCOMING = 4, 0


def run(program: bytes, packet: bytes, interface: int, kind: int) -> int:
    """A classic BPF machine (net/core/filter.c) for the instructions that we use."""
    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    known = {0xFFFFF000 + 4: kind, 0xFFFFF000 + 8: interface}
    a = x = at = 0
    for _ in range(len(code) + 1):
        op, yes, no, k = code[at]
        at += 1
        size = {0x20: 4, 0x28: 2, 0x30: 1, 0x48: 2}.get(op)
        if op == 0x06:
            return int(k)
        if size is not None:
            where = k + (x if op == 0x48 else 0)
            if op == 0x20 and where in known:
                a = known[where]
            elif where + size > len(packet):
                return 0
            else:
                a = int.from_bytes(packet[where : where + size], "big")
        elif op == 0xB1:
            x = 4 * (packet[k] & 15)
        elif op == 0x54:
            a &= k
        elif op == 0x15:
            at += yes if a == k else no
        elif op == 0x45:
            at += yes if a & k else no
        else:
            raise AssertionError(f"unknown instruction {op:#x}")
    raise AssertionError("the program does not end")


def segment(source_port: int, destination_port: int) -> bytes:
    return tcp(Segment(CLIENT, source_port, SERVER, destination_port, 1, 1, ACK, b"x"))


PROGRAM = assemble(port_filter(PORT, LOOPBACK))
TO_US, FROM_US, OTHER = segment(5, PORT), segment(PORT, 5), segment(5, 6)


@pytest.mark.parametrize(
    ("packet", "kept"),
    [
        (ipv4(TO_US), True),
        (ipv4(FROM_US), True),
        (ipv4(OTHER), False),
        (ipv4(bytes(8) + TO_US, version=0x47), True),
        (ipv4(bytes(8) + OTHER, version=0x47), False),
        (ipv4(TO_US, protocol=17), False),
        (ipv4(TO_US, fragment=8), False),
        (ipv6(TO_US), True),
        (ipv6(FROM_US), True),
        (ipv6(OTHER), False),
        (ipv6(TO_US, following=58), False),
        (ipv6(TO_US, following=0, extensions=b"\x06\x00" + bytes(6)), True),
        (b"\x95" + bytes(60), False),
        (b"", False),
    ],
)
def test_filter_keeps_the_port_only(packet: bytes, kept: bool) -> None:
    assert bool(run(PROGRAM, packet, LOOPBACK, INCOMING)) is kept


def test_loopback_packets_are_taken_once() -> None:
    assert run(PROGRAM, ipv4(TO_US), LOOPBACK, OUTGOING) == 0
    assert run(PROGRAM, ipv4(TO_US), LOOPBACK + 1, OUTGOING) > 65_600

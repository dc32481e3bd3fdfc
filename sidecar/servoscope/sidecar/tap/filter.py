"""The kernel's packet filter for one TCP port, as classic BPF. Pure.

Made for a cooked packet socket, where offset 0 is the IP header. IPv6 packets with extension
headers are let through and decided in user space: classic BPF has no loops.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["Instruction", "assemble", "port_filter"]

_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE = 0x20, 0x28, 0x30  # absolute
_LOAD_HALF_INDEXED = 0x48
_LOAD_IPV4_HEADER_LENGTH = 0xB1  # X = 4 * (byte & 15)
_AND = 0x54
_EQUAL, _ANY_BIT = 0x15, 0x45
_RETURN = 0x06

_ANCILLARY = 0xFFFFF000  # SKF_AD_OFF: not the packet but what the kernel knows of it
_PACKET_TYPE = _ANCILLARY + 4
_INTERFACE = _ANCILLARY + 8
_OUTGOING = 4
_WHOLE_PACKET = 0x40000
_TCP = 6


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step; ``yes`` and ``no`` are labels (empty: the next instruction)."""

    code: int
    value: int
    yes: str = ""
    no: str = ""
    label: str = ""


def port_filter(port: int, loopback_index: int) -> list[Instruction]:
    """TCP over IPv4 or IPv6 from or to ``port``; loopback packets once, not also as outgoing."""
    step = Instruction
    return [
        step(_LOAD_WORD, _INTERFACE),
        step(_EQUAL, loopback_index, no="version"),
        step(_LOAD_WORD, _PACKET_TYPE),
        step(_EQUAL, _OUTGOING, yes="drop"),
        step(_LOAD_BYTE, 0, label="version"),
        step(_AND, 0xF0),
        step(_EQUAL, 0x60, yes="ipv6"),
        step(_EQUAL, 0x40, no="drop"),
        step(_LOAD_BYTE, 9),
        step(_EQUAL, _TCP, no="drop"),
        step(_LOAD_HALF, 6),
        step(_ANY_BIT, 0x1FFF, yes="drop"),
        step(_LOAD_IPV4_HEADER_LENGTH, 0),
        step(_LOAD_HALF_INDEXED, 0),
        step(_EQUAL, port, yes="keep"),
        step(_LOAD_HALF_INDEXED, 2),
        step(_EQUAL, port, yes="keep", no="drop"),
        step(_LOAD_BYTE, 6, label="ipv6"),
        step(_EQUAL, 0, yes="keep"),
        step(_EQUAL, 43, yes="keep"),
        step(_EQUAL, 60, yes="keep"),
        step(_EQUAL, _TCP, no="drop"),
        step(_LOAD_HALF, 40),
        step(_EQUAL, port, yes="keep"),
        step(_LOAD_HALF, 42),
        step(_EQUAL, port, yes="keep", no="drop"),
        step(_RETURN, _WHOLE_PACKET, label="keep"),
        step(_RETURN, 0, label="drop"),
    ]


def assemble(program: list[Instruction]) -> bytes:
    """``struct sock_filter[]`` of a program; jumps are offsets from the next instruction."""
    places = {step.label: index for index, step in enumerate(program) if step.label}
    out = bytearray()
    for index, step in enumerate(program):
        yes = places[step.yes] - index - 1 if step.yes else 0
        no = places[step.no] - index - 1 if step.no else 0
        out += struct.pack("HBBI", step.code, yes, no, step.value)
    return bytes(out)

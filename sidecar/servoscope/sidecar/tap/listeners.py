"""Who listens on a port of this host (/proc/net/tcp, tcp6), and which addresses are its own."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["LocalAddresses", "listening_addresses", "parse_listeners", "read_listeners"]

_LISTEN = "0A"
_ANY = (bytes(4), bytes(16))
_MAX_KNOWN = 4096


class LocalAddresses:
    """``packed in LocalAddresses()``: whether an address is this host's own.

    The kernel says: only an own address can be bound. Answers are remembered, so an address that
    moves to this host later is missed until many others were asked for; interfaces seldom change.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def __contains__(self, packed: object) -> bool:
        if not isinstance(packed, bytes):
            return False
        known = self._known.get(packed)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[packed] = _can_bind(packed)
        return known


def parse_listeners(text: str, port: int, byteorder: str = sys.byteorder) -> set[bytes]:
    """Packed local addresses that listen on ``port``. Lines that are none are passed over."""
    found: set[bytes] = set()
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 4 or fields[3] != _LISTEN:
            continue
        address, _, number = fields[1].rpartition(":")
        try:
            if int(number, 16) == port:
                found.add(_packed(address, byteorder))
        except ValueError:
            continue
    return found


def listening_addresses(found: Iterable[bytes]) -> frozenset[bytes] | None:
    """The addresses as they appear in packets; None when any address may (a wildcard listens)."""
    addresses: set[bytes] = set()
    for packed in found:
        if packed in _ANY:
            return None
        mapped = ipaddress.IPv6Address(packed).ipv4_mapped if len(packed) == 16 else None
        addresses.add(mapped.packed if mapped is not None else packed)
    return frozenset(addresses)


def read_listeners(port: int) -> set[bytes]:
    """Packed local addresses that listen on ``port`` in our own network namespace."""
    found: set[bytes] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6 in this kernel
            found |= parse_listeners(Path("/proc/net", name).read_text(), port)
    return found


def _packed(text: str, byteorder: str) -> bytes:
    """/proc writes an address as 32-bit words in the host's byte order."""
    raw = bytes.fromhex(text)
    if len(raw) not in (4, 16):
        raise ValueError(f"no address: {text[:64]!r}")
    if byteorder == "big":
        return raw
    return b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))


def _can_bind(packed: bytes) -> bool:
    address = ipaddress.ip_address(packed)
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    if address.version == 6 and address.is_link_local:
        return True  # needs an interface to be bound; only own traffic or a neighbour's port shows
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True

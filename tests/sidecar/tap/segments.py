"""TCP segments of made-up connections, as IP packets and as Segment objects."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from servoscope.sidecar.tap.packet import ACK, FIN, RST, SYN, Segment

CLIENT, SERVER = b"\x7f\x00\x00\x01", b"\x7f\x00\x00\x01"
PORT, CLIENT_PORT = 8000, 40_000


def ipv4(payload: bytes, source: bytes = CLIENT, destination: bytes = SERVER, **over: int) -> bytes:
    """An IPv4 packet around ``payload``."""
    fields = {"version": 0x45, "total": 20 + len(payload), "fragment": 0, "protocol": 6} | over
    head = struct.pack(
        "!BBHHHBBH4s4s",
        fields["version"],
        0,
        fields["total"],
        7,
        fields["fragment"],
        64,
        fields["protocol"],
        0,
        source,
        destination,
    )
    return head + payload


def ipv6(payload: bytes, following: int = 6, extensions: bytes = b"") -> bytes:
    """An IPv6 packet on loopback."""
    address = bytes(15) + b"\x01"
    size = len(extensions) + len(payload)
    head = struct.pack("!IHBB16s16s", 6 << 28, size, following, 64, address, address)
    return head + extensions + payload


def tcp(segment: Segment, options: bytes = b"") -> bytes:
    """The TCP part of ``segment``."""
    words = (20 + len(options)) // 4
    return (
        struct.pack(
            "!HHIIBBHHH",
            segment.source_port,
            segment.destination_port,
            segment.sequence,
            segment.acknowledged,
            words << 4,
            segment.flags,
            65535,
            0,
            0,
        )
        + options
        + segment.payload
    )


@dataclass
class Connection:
    """Both ends of a connection: makes segments with the right numbers."""

    client_next: int = 1000
    server_next: int = 4_294_967_000  # wraps around soon
    client_port: int = CLIENT_PORT
    sent: list[Segment] = field(default_factory=list)

    def _segment(self, from_client: bool, flags: int, data: bytes) -> Segment:
        ours, theirs = (
            (self.client_next, self.server_next)
            if from_client
            else (self.server_next, self.client_next)
        )
        ports = (self.client_port, PORT) if from_client else (PORT, self.client_port)
        acknowledged = 0 if flags == SYN else theirs
        segment = Segment(CLIENT, ports[0], SERVER, ports[1], ours, acknowledged, flags, data)
        step = len(data) + bool(flags & SYN) + bool(flags & FIN)
        if from_client:
            self.client_next = (self.client_next + step) % 2**32
        else:
            self.server_next = (self.server_next + step) % 2**32
        self.sent.append(segment)
        return segment

    def open(self) -> list[Segment]:
        """Three-way handshake."""
        return [
            self._segment(True, SYN, b""),
            self._segment(False, SYN | ACK, b""),
            self._segment(True, ACK, b""),
        ]

    def client(self, data: bytes, flags: int = ACK) -> Segment:
        """The client sends."""
        return self._segment(True, flags, data)

    def server(self, data: bytes, flags: int = ACK) -> Segment:
        """The server sends."""
        return self._segment(False, flags, data)

    def close(self) -> list[Segment]:
        """Client first, then the server, last acknowledgement."""
        return [self.client(b"", FIN | ACK), self.server(b"", FIN | ACK), self.client(b"")]

    def reset(self) -> Segment:
        """The client breaks off."""
        return self.client(b"", RST | ACK)

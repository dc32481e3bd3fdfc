"""The kernel's capture ring (AF_PACKET, TPACKET_V3): packets of one port with kernel timestamps.

Needs CAP_NET_RAW. Nothing is put on the request path: the kernel copies matching packets into a
ring that we map. Stamps are CLOCK_REALTIME at the moment the packet passed the interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import select
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from servoscope.sidecar.tap.filter import assemble, port_filter

__all__ = ["LOOPBACK", "Ring", "frames"]

LOOPBACK = "lo"

_SOL_PACKET = 263
_PACKET_RX_RING = 5
_PACKET_STATISTICS = 6
_PACKET_VERSION = 10
_PACKET_IGNORE_OUTGOING = 23
_SO_ATTACH_FILTER = 26
_TPACKET_V3 = 2
_ETH_P_ALL = 0x0003

_BLOCK_BYTES = 256 * 1024  # several times the largest packet (64 KiB on loopback)
_BLOCKS = 128
_FRAME_BYTES = 2048
_RETIRE_MILLISECONDS = 50  # a block that is not full is handed over after this

_STATUS_OFFSET = 8
_USER_OWNS = 1
_block_header = struct.Struct("IIIIII").unpack_from  # version, priv, status, packets, first, bytes
_frame_header = struct.Struct("IIIIIIHH").unpack_from
_status = struct.Struct("I")


class Ring:
    """A capture of TCP ``port`` on ``interface`` (None: on all). A context manager.

    Raises PermissionError without CAP_NET_RAW, OSError for an interface that does not exist.
    """

    def __init__(self, interface: str | None, port: int) -> None:
        self._block = 0
        self._packets = 0
        self._drops = 0
        # With a protocol from the start a socket takes from all interfaces; what comes before the
        # ring stands is not in the ring. Protocol 0 takes nothing until it is bound.
        everywhere = socket.htons(_ETH_P_ALL) if interface is None else 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, everywhere)
        try:
            self._attach_filter(port)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, struct.pack("i", _TPACKET_V3))
            self._socket.setsockopt(
                _SOL_PACKET,
                _PACKET_RX_RING,
                struct.pack(
                    "7I",
                    _BLOCK_BYTES,
                    _BLOCKS,
                    _FRAME_BYTES,
                    _BLOCK_BYTES * _BLOCKS // _FRAME_BYTES,
                    _RETIRE_MILLISECONDS,
                    0,
                    0,
                ),
            )
            if interface == LOOPBACK:
                # Saves the kernel the second look; elsewhere it would hide what the server sends.
                # Linux before 4.20 has it not; the filter drops those packets in any case.
                with contextlib.suppress(OSError):
                    self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            self._map = mmap.mmap(
                self._socket.fileno(),
                _BLOCK_BYTES * _BLOCKS,
                mmap.MAP_SHARED,
                mmap.PROT_READ | mmap.PROT_WRITE,
            )
            if interface is not None:
                self._socket.bind((interface, _ETH_P_ALL))
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._map.close()
        self._socket.close()

    def take_block(self, wait_seconds: float) -> bytes | None:
        """The next block of captured packets, or None when there was none in time.

        Raises OSError when the interface went away.
        """
        base = self._block * _BLOCK_BYTES
        if not self._ready(base):
            for _, event in self._poll.poll(wait_seconds * 1000):
                if event & select.POLLERR:
                    error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    raise OSError(error, "the interface went down")
            if not self._ready(base):
                return None
        used = _block_header(self._map, base)[5]
        block = self._map[base : base + min(used, _BLOCK_BYTES)]
        _status.pack_into(self._map, base + _STATUS_OFFSET, 0)  # back to the kernel
        self._block = (self._block + 1) % _BLOCKS
        return block

    def statistics(self) -> tuple[int, int]:
        """(packets, dropped packets) since the start."""
        raw = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 12)
        packets, drops, _ = struct.unpack("III", raw)  # since the last time it was asked
        self._packets += packets
        self._drops += drops
        return self._packets, self._drops

    def _ready(self, base: int) -> bool:
        return bool(_status.unpack_from(self._map, base + _STATUS_OFFSET)[0] & _USER_OWNS)

    def _attach_filter(self, port: int) -> None:
        program = assemble(port_filter(port, socket.if_nametoindex(LOOPBACK)))
        code = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, head)


def frames(block: bytes) -> Iterator[tuple[int, int, float]]:
    """(offset, captured bytes, seconds since the epoch) of each packet in a block. Pure.

    A block that contradicts itself ends early, never outside its own bytes.
    """
    if len(block) < 48:
        return
    _, _, _, count, offset, _ = _block_header(block)
    for _ in range(count):
        if offset + 32 > len(block):
            return
        following, seconds, nanoseconds, captured, _, _, _, network = _frame_header(block, offset)
        if offset + network + captured <= len(block):
            yield offset + network, captured, seconds + nanoseconds * 1e-9
        if not following:
            return
        offset += following

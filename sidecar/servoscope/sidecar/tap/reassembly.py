"""One direction of a TCP connection: segments in any order in, bytes in order out. Pure.

Retransmitted and overlapping bytes are delivered once. Bytes that we miss are waited for within a
bound, and given up as soon as the receiver acknowledges them: it has them, so only we do not, and
they will not come again.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["GAP", "Piece", "Stream"]

#: Stands in a delivery for bytes that are missing for good.
GAP = None
Piece = bytes | None

_MODULUS = 1 << 32
_HALF = 1 << 31
_MAX_SEGMENTS = 512
_MAX_BYTES = 4 * 1024 * 1024


class Stream:
    """``next`` is the sequence number of the next byte to deliver; None before the first."""

    __slots__ = ("_end", "_held", "_held_bytes", "next")

    def __init__(self) -> None:
        self.next: int | None = None
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._end: int | None = None

    def start(self, sequence: int) -> None:
        """The first byte to come has this number. Later calls change nothing."""
        if self.next is None:
            self.next = sequence % _MODULUS

    @property
    def ended(self) -> bool:
        """All bytes before the FIN were delivered (or given up)."""
        return self._end is not None and self._end == self.next

    def push(self, sequence: int, data: bytes) -> Sequence[Piece]:
        """``data`` came; what can be delivered now."""
        if self.next is None:
            self.next = sequence
        if sequence == self.next and not self._held:
            self.next = (sequence + len(data)) % _MODULUS
            return (data,)
        ahead = (sequence - self.next) % _MODULUS
        if ahead >= _HALF:  # begins before what was delivered
            known = _MODULUS - ahead
            if known >= len(data):
                return ()
            data, sequence = data[known:], self.next
        self._hold(sequence, data)
        if len(self._held) > _MAX_SEGMENTS or self._held_bytes > _MAX_BYTES:
            return (*self._deliver(), *self._skip())
        return self._deliver()

    def fin(self, sequence: int) -> None:
        """The direction ends at this number (that of the FIN itself)."""
        self._end = sequence % _MODULUS

    def acknowledged(self, sequence: int) -> Sequence[Piece]:
        """The receiver has all bytes before ``sequence``; what we lack of them is a gap."""
        if self.next is None:
            return ()
        missing = (sequence - self.next) % _MODULUS
        if missing == 0 or missing >= _HALF:
            return ()
        if self._end is not None and sequence == (self._end + 1) % _MODULUS:
            missing -= 1  # the FIN counts as one
            if missing == 0:
                return ()
        if self._held:
            return self._skip()
        self.next = (self.next + missing) % _MODULUS
        return (GAP,)

    def _hold(self, sequence: int, data: bytes) -> None:
        old = self._held.get(sequence)
        if old is None or len(old) < len(data):
            self._held[sequence] = data
            self._held_bytes += len(data) - (len(old) if old is not None else 0)

    def _deliver(self) -> list[Piece]:
        """Held bytes that are next now."""
        out: list[Piece] = []
        while self._held and self.next is not None:
            first = self._first()
            ahead = (first - self.next) % _MODULUS
            if 0 < ahead < _HALF:
                break
            data = self._held.pop(first)
            self._held_bytes -= len(data)
            new = data[_MODULUS - ahead :] if ahead else data
            if new:
                self.next = (self.next + len(new)) % _MODULUS
                out.append(new)
        return out

    def _skip(self) -> list[Piece]:
        """Give up what is missing before the first held byte."""
        if not self._held or self.next is None:
            return []
        self.next = self._first()
        return [GAP, *self._deliver()]

    def _first(self) -> int:
        """The held segment nearest to ``next``; those that begin before it come first."""
        base = ((self.next or 0) - _HALF) % _MODULUS
        return min(self._held, key=lambda sequence: (sequence - base) % _MODULUS)

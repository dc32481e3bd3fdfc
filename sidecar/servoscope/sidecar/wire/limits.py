"""Bounds of what one connection, and all connections together, may make us hold.

Nothing a client or an engine sends may grow our memory without end. What goes beyond a bound is
given up (a field of the record becomes unknown) and counted; it never raises and never stops the
traffic that is being watched.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_LIMITS", "Budget", "Buffer", "Limits"]

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one connection. Bytes unless the name says otherwise."""

    #: A larger request body is not parsed: streaming and model come from the response alone.
    request_body_bytes: int = 16 * _MIB
    #: A larger whole (not streamed) answer is not parsed: its token counts are unknown.
    response_body_bytes: int = 16 * _MIB
    #: One event of a stream. llama.cpp's last one repeats the prompt.
    event_bytes: int = 16 * _MIB
    #: What a compressed body may grow to before we stop reading it (a "zip bomb").
    decoded_bytes: int = 256 * _MIB
    #: Bytes that advance neither head nor body of a message: endless headers, trailers, newlines.
    silent_bytes: int = 64 * _KIB
    #: Request target (path and query). vLLM's server refuses above 64 KiB of head.
    target_bytes: int = 4 * _KIB
    #: Requests sent ahead of their answers on one connection (pipelining).
    open_calls: int = 64
    #: Gaps between token events kept of one request; later ones only enter the maximum.
    gaps: int = 512
    #: How often one connection may be found again after it was lost.
    resyncs: int = 64


DEFAULT_LIMITS = Limits()


class Budget:
    """Bytes that all connections of a source together may hold in buffers."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int = 256 * _MIB) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes; False (and nothing reserved) when that is beyond the limit."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Return ``size`` bytes."""
        self.used -= size


class Buffer:
    """Bytes waiting to become whole, within a limit of its own and a shared budget."""

    __slots__ = ("_budget", "_data", "_limit")

    def __init__(self, limit: int, budget: Budget) -> None:
        self._data = bytearray()
        self._limit = limit
        self._budget = budget

    def __len__(self) -> int:
        return len(self._data)

    def append(self, data: bytes) -> bool:
        """Add ``data``; False (nothing added) when that is beyond a bound."""
        if len(self._data) + len(data) > self._limit or not self._budget.take(len(data)):
            return False
        self._data += data
        return True

    def rfind(self, what: bytes, start: int) -> int:
        """Position of the last ``what`` at or after ``start``, or -1."""
        return self._data.rfind(what, max(0, start))

    def take(self, size: int | None = None) -> bytes:
        """Remove and return the first ``size`` bytes, or all."""
        size = len(self._data) if size is None else size
        out = bytes(self._data[:size])
        del self._data[:size]
        self._budget.give(len(out))
        return out

    def clear(self) -> None:
        """Forget everything."""
        self._budget.give(len(self._data))
        self._data = bytearray()

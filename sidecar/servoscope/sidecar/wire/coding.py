"""Content codings of HTTP bodies (RFC 9110 section 8.4), undone as the bytes come, bounded."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

__all__ = ["CodingError", "Inflater", "inflater_for"]

_STEP_BYTES = 256 * 1024  # most bytes that one step of decompression may yield
_GZIP = 16 + zlib.MAX_WBITS


class CodingError(ValueError):
    """A body that is not what its Content-Encoding says, or that grows beyond its bound."""


class Inflater:
    """gzip (several members allowed) or deflate. Flushed data come out at once."""

    __slots__ = ("_gzip", "_head", "_left", "_zlib")

    def __init__(self, *, gzip: bool, limit: int) -> None:
        self._gzip = gzip
        self._head = b""
        self._left = limit
        self._zlib = zlib.decompressobj(_GZIP) if gzip else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decoded pieces. Raises CodingError."""
        if self._zlib is None:
            self._head += data
            if len(self._head) < 2:
                return
            data, self._head = self._head, b""
            self._zlib = zlib.decompressobj(_deflate_bits(data))
        while True:
            if self._zlib.eof:
                if not self._gzip or not data.startswith(b"\x1f"):
                    return  # padding behind the end
                self._zlib = zlib.decompressobj(_GZIP)
            try:
                out = self._zlib.decompress(data, _STEP_BYTES)
            except zlib.error as error:
                raise CodingError(f"not what Content-Encoding says: {error}") from None
            self._left -= len(out)
            if self._left < 0:
                raise CodingError("decoded body beyond its bound")
            if out:
                yield out
            data = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
            # A full step may leave decoded bytes inside zlib although its input is used up.
            if not data and (self._zlib.eof or len(out) < _STEP_BYTES):
                return


def _deflate_bits(head: bytes) -> int:
    """zlib's head is a multiple of 31 (RFC 1950); some servers send "deflate" without it."""
    wrapped = head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0
    return zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS


def inflater_for(coding: bytes, limit: int) -> Inflater | None:
    """The decoder for a Content-Encoding; None for identity. Raises CodingError for others."""
    name = coding.strip().lower()
    if name in (b"", b"identity"):
        return None
    if name in (b"gzip", b"x-gzip"):
        return Inflater(gzip=True, limit=limit)
    if name == b"deflate":
        return Inflater(gzip=False, limit=limit)
    raise CodingError("content coding not supported")

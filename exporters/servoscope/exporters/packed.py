"""Texts that come packed: gzip undone piece by piece, never beyond a bound. Pure.

A kilobyte of gzip can hold a megabyte. What is undone is therefore asked for in pieces of known
size, and the first byte beyond the bound ends it: no more than the bound is ever in memory.
"""

from __future__ import annotations

import zlib

__all__ = ["MAGIC", "Packed", "PackedError", "PackedTooLargeError", "unpacked"]

MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # gzip header and trailer, largest window


class PackedError(ValueError):
    """Not gzip, damaged, cut off, or larger than the bound when undone. The text says which.

    ``made`` is what the last piece gave before that, within the bound.
    """

    def __init__(self, why: str, made: bytes = b"") -> None:
        super().__init__(why)
        self.made = made


class PackedTooLargeError(PackedError):
    """Larger than the bound when undone."""


class Packed:
    """Undoes one gzip stream as its pieces arrive."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._stream = zlib.decompressobj(wbits=_GZIP_WINDOW)

    def feed(self, piece: bytes) -> bytes:
        """What ``piece`` adds to the text. Raises PackedError."""
        out: list[bytes] = []
        while piece:
            if self._stream.eof:  # gzip files may be put one after the other
                piece = piece.lstrip(b"\0")
                if not piece:
                    break
                self._stream = zlib.decompressobj(wbits=_GZIP_WINDOW)
            try:
                made = self._stream.decompress(piece, self._left + 1)
            except zlib.error as error:
                raise PackedError(f"gzip is damaged: {error}", b"".join(out)) from error
            self._left -= len(made)
            if self._left < 0:
                out.append(made[: self._left])
                why = f"gzip holds more than {self._max_bytes} bytes"
                raise PackedTooLargeError(why, b"".join(out))
            out.append(made)
            piece = self._stream.unconsumed_tail or self._stream.unused_data
        return b"".join(out)

    def finish(self) -> None:
        """The pieces have ended. Raises PackedError when the gzip stream has not."""
        if not self._stream.eof:
            raise PackedError("gzip is cut off")


def unpacked(data: bytes, max_bytes: int) -> tuple[bytes, str]:
    """``data`` as it is unless it is gzip; and why it is not the whole text ("" when it is).

    Of a damaged, cut or too large stream that is kept which could be undone.
    """
    if not data.startswith(MAGIC):
        return data, ""
    packed, out = Packed(max_bytes), bytearray()
    try:
        for start in range(0, len(data), 4_096):
            out += packed.feed(data[start : start + 4_096])
        packed.finish()
    except PackedError as error:
        return bytes(out + error.made), str(error)
    return bytes(out), ""

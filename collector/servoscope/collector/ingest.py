"""From the bytes of a POST to a checked batch. Pure; every refusal has a status and names a field.

A body is decompressed piece by piece against a bound, so that a small one that unpacks to gigabytes
costs no more than the bound.
"""

from __future__ import annotations

import math
import zlib

import orjson

from servoscope.exporters.wire import Batch, WireError, decode_batch

__all__ = ["IngestError", "check_headers", "decode_body"]

_GZIP = 16 + zlib.MAX_WBITS  # zlib's code for "a gzip header and nothing else"
_MAX_GZIP_MEMBERS = 8  # each one costs a copy of what follows it
_ENCODINGS = ("", "identity", "gzip")


class IngestError(ValueError):
    """A body that is refused whole: HTTP ``status``, the ``field`` at fault, and ``why``."""

    def __init__(self, status: int, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.status = status
        self.field = field
        self.why = why


def check_headers(
    content_type: str | None,
    content_encoding: str | None,
    content_length: str | None,
    max_body_bytes: int,
) -> str:
    """Refuse from the headers alone what need not be read; returns the encoding in lower case."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise IngestError(415, "content-type", f"expected application/json, got {kind[:64]!r}")
    encoding = (content_encoding or "").strip().lower()
    if encoding not in _ENCODINGS:
        raise IngestError(415, "content-encoding", f"expected gzip, got {encoding[:64]!r}")
    if content_length is not None:
        digits = content_length.strip()
        if not (digits.isascii() and digits.isdigit()):
            raise IngestError(400, "content-length", "not a whole number")
        if len(digits) > 18 or int(digits) > max_body_bytes:
            raise IngestError(413, "body", f"larger than {max_body_bytes} bytes")
    return encoding


def decode_body(
    body: bytes, encoding: str = "", *, max_decoded_bytes: int, now: float = math.inf
) -> Batch:
    """A received body as a batch. Raises IngestError with the status to answer."""
    if encoding == "gzip":
        body = _gunzip(body, max_decoded_bytes)
    elif len(body) > max_decoded_bytes:
        raise IngestError(413, "body", f"larger than {max_decoded_bytes} bytes")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # the message of the parser, never a piece of the body: it could hold anything
        raise IngestError(400, "body", f"not JSON: {error.msg} at byte {error.pos}") from None
    del body
    try:
        return decode_batch(parsed, now=now)
    except WireError as error:
        raise IngestError(400, error.field, error.why) from None


def _gunzip(body: bytes, limit: int) -> bytes:
    """One or more gzip members, at most ``limit`` bytes in all."""
    parts: list[bytes] = []
    total = 0
    rest = body
    for _ in range(_MAX_GZIP_MEMBERS):
        member = zlib.decompressobj(wbits=_GZIP)
        try:
            part = member.decompress(rest, limit - total + 1)
        except zlib.error as error:
            raise IngestError(400, "body", f"not gzip: {error}") from None
        total += len(part)
        if total > limit:
            raise IngestError(413, "body", f"larger than {limit} bytes when decompressed")
        if not member.eof:
            raise IngestError(400, "body", "gzip data ends before their end mark")
        parts.append(part)
        rest = member.unused_data
        if not rest:
            return b"".join(parts)
    raise IngestError(400, "body", f"more than {_MAX_GZIP_MEMBERS} gzip members")

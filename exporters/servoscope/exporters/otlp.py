"""Spans out of an OTLP trace request in protobuf (``ExportTraceServiceRequest``). Pure.

Only what is asked for is decoded: a span whose name is not wanted costs a few microseconds, and of
attributes only the named ones are kept, so that nothing people wrote can come along. The wire form
is protobuf's; the field numbers are those of opentelemetry-proto 1.x (trace/v1/trace.proto), which
may add fields but never changes these.

Why no library: protobuf and gRPC's runtime are 19 MB beside a sidecar of 30, for ten fields.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["AttributeValue", "OtlpError", "Span", "read_spans"]

AttributeValue = str | bool | int | float

_MAX_TEXT = 1_024
_MAX_NAME = 256
_MAX_SPANS = 20_000  # of one request: exporters send 512 at most unless told otherwise
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_STATUS_ERROR = 2


class OtlpError(ValueError):
    """The bytes are no trace request; the text says what is wrong, never what was in them."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Ids are hex; times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    start_nanoseconds: int
    end_nanoseconds: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    failed: bool = False  # its status is "error"

    @property
    def seconds(self) -> float | None:
        """How long it took; ``None`` where its ends are not in order."""
        if not 0 < self.start_nanoseconds <= self.end_nanoseconds:
            return None
        return (self.end_nanoseconds - self.start_nanoseconds) / 1e9


def read_spans(
    body: bytes,
    *,
    scope: str,
    wanted: Callable[[str], bool],
    attributes: Collection[str],
) -> list[Span]:
    """The spans of instrumentation ``scope`` whose name is ``wanted``, with these attributes.

    Raises OtlpError when the bytes are not a trace request or hold more than 20,000 spans.
    """
    view = memoryview(body)
    found: list[Span] = []
    seen = 0
    for number, resource in _messages(view):
        if number != 1:
            continue
        for inner, scoped in _messages(resource):
            if inner != 2 or _scope_name(scoped) != scope:
                continue
            for kind, packed in _messages(scoped):
                if kind != 2:
                    continue
                seen += 1
                if seen > _MAX_SPANS:
                    raise OtlpError(f"more than {_MAX_SPANS} spans in one request")
                span = _span(packed, wanted, attributes)
                if span is not None:
                    found.append(span)
    return found


def _scope_name(scoped: memoryview) -> str:
    for number, scope in _messages(scoped):
        if number == 1:
            for inner, name in _messages(scope):
                if inner == 1:
                    return _text(name, _MAX_NAME)
    return ""


def _span(
    packed: memoryview, wanted: Callable[[str], bool], attributes: Collection[str]
) -> Span | None:
    """One span, or ``None`` as soon as its name is read and not wanted."""
    ids: dict[int, str] = {}
    times: dict[int, int] = {}
    name, failed = "", False
    kept: dict[str, AttributeValue] = {}
    for number, kind, value in _fields(packed):
        if number in (1, 2, 4) and isinstance(value, memoryview):
            ids[number] = bytes(value[:16]).hex()
        elif number == 5 and isinstance(value, memoryview):
            name = _text(value, _MAX_NAME)
            if not wanted(name):
                return None
        elif number in (7, 8) and kind == _FIXED64 and isinstance(value, int):
            times[number] = value
        elif number == 9 and isinstance(value, memoryview):
            _attribute(value, attributes, kept)
        elif number == 15 and isinstance(value, memoryview):
            failed = any(n == 3 and v == _STATUS_ERROR for n, _, v in _fields(value))
    if not wanted(name):
        return None
    return Span(
        ids.get(1, ""), ids.get(2, ""), ids.get(4, ""), name,
        times.get(7, 0), times.get(8, 0), kept, failed,
    )  # fmt: skip


def _attribute(
    packed: memoryview, wanted: Collection[str], kept: dict[str, AttributeValue]
) -> None:
    key = ""
    for number, _, value in _fields(packed):
        if not isinstance(value, memoryview):
            continue
        if number == 1:
            key = _text(value, _MAX_NAME)
            if key not in wanted:
                return
        elif number == 2 and key:
            found = _value(value)
            if found is not None:
                kept[key] = found


def _value(packed: memoryview) -> AttributeValue | None:
    """A text, truth value, whole number or finite number; ``None`` for anything else."""
    for number, kind, value in _fields(packed):
        if number == 1 and isinstance(value, memoryview):
            return _text(value, _MAX_TEXT)
        if number == 2 and kind == _VARINT:
            return bool(value)
        if number == 3 and kind == _VARINT and isinstance(value, int):
            return value - (1 << 64) if value >= 1 << 63 else value
        if number == 4 and kind == _FIXED64 and isinstance(value, int):
            (double,) = struct.unpack("<d", value.to_bytes(8, "little"))
            return float(double) if math.isfinite(double) else None
    return None


def _text(value: memoryview, most: int) -> str:
    return bytes(value[: 4 * most]).decode("utf-8", "replace")[:most]


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    for number, _, value in _fields(data):
        if isinstance(value, memoryview):
            yield number, value


def _fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """(field number, wire type, value) of one message, one after the other."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at, end)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise OtlpError("a field without a number")
        if kind == _VARINT:
            number_value, at = _varint(data, at, end)
            yield number, kind, number_value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at, end)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise OtlpError(f"a field of wire type {kind}")
        if size > end - at:
            raise OtlpError("cut off within a field")
        value = data[at : at + size]
        at += size
        yield number, kind, value if kind == _BYTES else int.from_bytes(value, "little")


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place + 1
        shift += 7
    raise OtlpError("cut off within a number, or one of more than 64 bits")

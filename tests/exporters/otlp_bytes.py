"""An OTLP trace request in protobuf, as an exporter writes it: the other side of ``otlp.py``."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["captured_spans", "encode", "field", "varint"]


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: bytes | int | float) -> bytes:
    """One field: bytes and texts by length, whole numbers as varints, floats as doubles."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value)


def _any(value: Any) -> bytes:
    if isinstance(value, bool):
        return field(2, int(value))
    if isinstance(value, int):
        return field(3, value)
    if isinstance(value, float):
        return field(4, value)
    return field(1, str(value).encode())


def _attributes(number: int, told: Mapping[str, Any]) -> bytes:
    pairs = (field(1, k.encode()) + field(2, _any(v)) for k, v in told.items())
    return b"".join(field(number, pair) for pair in pairs)


def _span(told: Mapping[str, Any]) -> bytes:
    start, end = told["start_ns"], told["start_ns"] + round(told["dur_ms"] * 1e6)
    parent = told.get("parent") or ""
    return b"".join([
        field(1, bytes.fromhex(told["trace"])), field(2, bytes.fromhex(told["span"])),
        field(4, bytes.fromhex(parent)) if parent else b"",
        field(5, told["name"].encode()), field(6, told.get("kind", 1)),
        varint(7 << 3 | 1) + struct.pack("<Q", start), varint(8 << 3 | 1) + struct.pack("<Q", end),
        _attributes(9, told.get("attrs", {})),
        field(11, varint(1 << 3 | 1) + struct.pack("<Q", start) + field(2, b"schedule")),
        field(15, field(3, 2) if told.get("failed") else b""),
        varint(16 << 3 | 5) + struct.pack("<I", 257),
    ])  # fmt: skip


def encode(spans: Iterable[Mapping[str, Any]], scope: str = "sglang server") -> bytes:
    """``spans`` in the form of the fixture spans.jsonl."""
    scoped = field(1, field(1, scope.encode())) + b"".join(field(2, _span(s)) for s in spans)
    resource = field(1, _attributes(1, {"service.name": "sglang"}))
    return field(1, resource + field(2, scoped))


def captured_spans() -> list[dict[str, Any]]:
    """Spans of six requests, captured from SGLang 0.5.23; most of single tokens left out."""
    path = Path(__file__).parents[1] / "fixtures" / "engines" / "sglang" / "0.5.23" / "spans.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]

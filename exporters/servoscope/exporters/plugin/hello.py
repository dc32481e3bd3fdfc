"""Sidecar side: the first line of either plug-in socket, and how its values are believed.

Pure. Garbage in one field becomes None (or empty); it never costs the other fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from servoscope.exporters.plugin.lines import PROTOCOL

__all__ = [
    "Hello",
    "ProtocolError",
    "clock_of",
    "count_of",
    "flag_of",
    "hello_from_message",
    "number_of",
    "text_of",
]

MAX_TEXT = 256
MAX_COUNT = 2**53


class ProtocolError(RuntimeError):
    """The other side is no plug-in of a version we know, or it refused us; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First line of either socket."""

    protocol: int
    version: str  # of the plug-in
    engine: str
    engine_version: str
    boot_id: str  # one an engine process: another one means a restart
    pid: int
    rank: int | None = None
    model_names: tuple[str, ...] = ()
    started_unix_seconds: float | None = None
    boot_values: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # what this engine version lacks
    received_by: str = "engine"  # or "http": whose clock starts a request
    ttft_by: str = "engine"  # or "http": whose clock ends TTFT of a streamed answer
    off: str = ""  # why the plug-in does nothing, '' when it works

    @property
    def model_name(self) -> str:
        """The name the model is served under first."""
        return self.model_names[0] if self.model_names else "unknown"


def hello_from_message(message: Mapping[str, Any]) -> Hello:
    """Check the first line. Raises ProtocolError."""
    kind = message.get("type")
    if kind == "refused":
        raise ProtocolError(f"the plug-in refused: {text_of(message.get('why'))}")
    if kind != "hello":
        raise ProtocolError(f"first line is {kind!r}, not hello: no Servoscope plug-in"[:200])
    protocol = message.get("protocol")
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"protocol: the plug-in in the engine speaks {protocol!r}, this sidecar {PROTOCOL};"
            " install the same servoscope version in both and restart the older one"[:300]
        )
    pid, boot = message.get("pid"), message.get("boot_id")
    if not isinstance(pid, int) or not isinstance(boot, str):
        raise ProtocolError("hello: pid and boot_id are missing")
    names, values = message.get("model_names"), message.get("boot_values")
    missing = message.get("missing")
    return Hello(
        protocol=PROTOCOL,
        version=text_of(message.get("version")) or "unknown",
        engine=text_of(message.get("engine")) or "unknown",
        engine_version=text_of(message.get("engine_version")) or "unknown",
        boot_id=boot[:MAX_TEXT],
        pid=pid,
        rank=count_of(message.get("rank")),
        model_names=tuple(map(text_of, names)) if isinstance(names, list) else (),
        started_unix_seconds=number_of(message.get("started_unix_seconds")),
        boot_values=dict(values) if isinstance(values, dict) else {},
        missing=tuple(map(text_of, missing)) if isinstance(missing, list) else (),
        received_by=clock_of(message, "received_by") or "engine",
        ttft_by=clock_of(message, "ttft_by") or "engine",
        off=text_of(message.get("off")),
    )


def text_of(value: object) -> str:
    """A string, cut to MAX_TEXT; anything else is empty."""
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def clock_of(message: Mapping[str, Any], field_name: str) -> str:
    """Whose clock it is, ``http`` or ``engine``; empty when the message does not say."""
    said = text_of(message.get(field_name))
    return said if said in ("http", "engine") else ""


def number_of(value: object) -> float | None:
    """A finite number, or None (garbage in one field must not cost the others)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def count_of(value: object) -> int | None:
    """A whole number that a float holds exactly, or None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if -MAX_COUNT <= value <= MAX_COUNT else None


def flag_of(value: object) -> bool | None:
    """True or False, or None."""
    return value if isinstance(value, bool) else None

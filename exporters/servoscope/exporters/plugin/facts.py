"""What a plug-in says of itself and its engine in the first line of a socket (hello)."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servoscope.exporters.plugin.lines import PROTOCOL

__all__ = ["hello", "process_start_unix_seconds"]

#: One a process: tells a restarted engine from a reconnect. A forked child makes its own.
_BOOT: dict[int, str] = {}


def boot_id() -> str:
    """Identity of this process as an engine."""
    return _BOOT.setdefault(os.getpid(), uuid.uuid4().hex)


def plugin_version() -> str:
    """Version of this distribution."""
    try:
        return importlib.metadata.version("servoscope")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def process_start_unix_seconds(pid: int, now: float | None = None) -> float:
    """When a process started (from /proc; ``now`` where /proc does not say)."""
    current = time.time() if now is None else now
    try:
        # Field 22 after the name, which may hold spaces and parentheses (proc(5)).
        ticks = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return current
    return current - up + ticks / os.sysconf("SC_CLK_TCK")


def hello(
    engine: str,
    *,
    boot_values: Mapping[str, Any],
    missing: list[str],
    rank: int | None,
    off: str,
    model_names: list[str],
) -> dict[str, Any]:
    """The first line. ``engine``: the name of the engine, which is that of its package too."""
    pid = os.getpid()
    return {
        "type": "hello",
        "protocol": PROTOCOL,
        "version": plugin_version(),
        "engine": engine,
        "engine_version": str(getattr(sys.modules.get(engine), "__version__", "unknown")),
        "boot_id": boot_id(),
        "boot_values": dict(boot_values),
        "pid": pid,
        "rank": rank,
        "model_names": model_names,
        "started_unix_seconds": round(process_start_unix_seconds(pid), 3),
        "missing": list(missing),
        "off": off,
    }

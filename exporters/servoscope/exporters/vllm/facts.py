"""What the plug-in says of itself and its engine in the first line of both sockets (hello)."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servoscope.exporters.vllm.lines import PROTOCOL

__all__ = ["config_values", "engine_version", "hello", "model_names", "process_start_unix_seconds"]

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


def engine_version() -> str:
    """vLLM's version, as far as it is loaded."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


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


def model_names(vllm_config: Any) -> list[str]:
    """Names the model is served under, the first one first."""
    model = getattr(vllm_config, "model_config", None)
    served = getattr(model, "served_model_name", None) or getattr(model, "model", None)
    if served is None:
        return []
    return [str(name) for name in served] if isinstance(served, (list, tuple)) else [str(served)]


def config_values(vllm_config: Any) -> dict[str, Any]:
    """Settings at boot that bound or explain what is measured. Only plain values."""
    wanted = {
        "scheduler_config": (
            "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs",
            "max_num_active_seqs", "long_prefill_token_threshold", "enable_chunked_prefill",
            "async_scheduling", "policy",
        ),
        "parallel_config": (
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        ),
        "cache_config": ("block_size", "enable_prefix_caching", "num_gpu_blocks"),
        "model_config": ("max_model_len", "dtype", "revision"),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for section, names in wanted.items():
        part = getattr(vllm_config, section, None)
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                found[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return found


def hello(
    vllm_config: Any, *, boot_values: Mapping[str, Any], missing: list[str], rank: int | None
) -> dict[str, Any]:
    """The first line."""
    pid = os.getpid()
    return {
        "type": "hello",
        "protocol": PROTOCOL,
        "version": plugin_version(),
        "engine": "vllm",
        "engine_version": engine_version(),
        "boot_id": boot_id(),
        "boot_values": dict(boot_values),
        "pid": pid,
        "rank": rank,
        "model_names": model_names(vllm_config),
        "started_unix_seconds": round(process_start_unix_seconds(pid), 3),
        "missing": list(missing),
    }

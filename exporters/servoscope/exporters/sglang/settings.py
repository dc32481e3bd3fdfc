"""How an SGLang was started, as far as its request sources depend on it. Pure.

From /server_info where that answers, else from the command line of its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTING_NAMES", "Settings", "settings_of"]

#: What is kept of /server_info: it holds hundreds of values, keys among them.
SETTING_NAMES = (
    "enable_metrics",
    "export_metrics_to_file",
    "export_metrics_to_file_dir",
    "log_requests",
    "log_requests_level",
    "decode_log_interval",
    "enable_trace",
    "otlp_traces_endpoint",
)
_TEXTLESS_LEVELS = (0, 1)
_DEFAULT_LEVEL = 2  # of --log-requests-level, in every version that was read


@dataclass(frozen=True, slots=True)
class Settings:
    """``None``: not told. ``file_dir`` is as the engine has it, maybe relative to where it runs."""

    metrics: bool | None = None
    file: bool | None = None
    file_dir: str | None = None
    writes_text: bool | None = None  # is what people wrote in the request file?
    decode_log_interval: int | None = None
    trace: bool | None = None
    trace_endpoint: str | None = None


def settings_of(told: Mapping[str, Any], argv: Sequence[str]) -> Settings:
    """``told``: what /server_info said (its names); empty when it did not answer."""
    if not any(name in told for name in SETTING_NAMES):
        told = _from_command_line(argv)
    logs, level = _flag(told, "log_requests"), told.get("log_requests_level", _DEFAULT_LEVEL)
    writes_text = None if logs is None else not (logs and level in _TEXTLESS_LEVELS)
    directory, endpoint = told.get("export_metrics_to_file_dir"), told.get("otlp_traces_endpoint")
    interval = told.get("decode_log_interval")
    return Settings(
        metrics=_flag(told, "enable_metrics"),
        file=_flag(told, "export_metrics_to_file"),
        file_dir=directory if isinstance(directory, str) and directory else None,
        writes_text=writes_text,
        decode_log_interval=interval if isinstance(interval, int) else None,
        trace=_flag(told, "enable_trace"),
        trace_endpoint=endpoint if isinstance(endpoint, str) else None,
    )


def _flag(told: Mapping[str, Any], name: str) -> bool | None:
    value = told.get(name)
    return value if isinstance(value, bool) else None


def _from_command_line(argv: Sequence[str]) -> dict[str, Any]:
    """The same values from flags; empty without a command line."""
    if not argv:
        return {}
    found: dict[str, Any] = {}
    for name in ("enable_metrics", "export_metrics_to_file", "log_requests", "enable_trace"):
        found[name] = f"--{name.replace('_', '-')}" in argv
    for name in ("export_metrics_to_file_dir", "otlp_traces_endpoint"):
        found[name] = _value(argv, name)
    for name in ("log_requests_level", "decode_log_interval"):
        value = _value(argv, name)
        if value is not None and value.isascii() and value.isdigit():
            found[name] = int(value)
    return found


def _value(argv: Sequence[str], name: str) -> str | None:
    flag, found = f"--{name.replace('_', '-')}", None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{flag}="):
            found = word[len(flag) + 1 :]
    return found

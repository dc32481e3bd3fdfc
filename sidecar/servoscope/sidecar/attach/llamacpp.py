"""How the llama.cpp that a target is was started: its flags, its environment, its /props.

Of the environment only the few names of ``exporters.llamacpp.settings`` are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from servoscope.exporters.llamacpp.props import Props, read_props
from servoscope.exporters.llamacpp.settings import VARIABLES, Settings, settings_of
from servoscope.sidecar.attach import processes

if TYPE_CHECKING:
    from servoscope.sidecar.attach.target import Target

__all__ = ["SettingsOf", "boot_values", "kept_of_props", "started_with"]

_ENGINE = "llamacpp"
_KEPT = ("slots", "slot_context_tokens", "sleeping", "slots_endpoint", "metrics_endpoint")


def kept_of_props(told: Mapping[str, Any]) -> tuple[Props, dict[str, Any]]:
    """What /props said, and of that what a target keeps. Empty where it is no /props."""
    try:
        props = read_props(told)
    except ValueError:
        return Props(), {}
    found = asdict(props)
    return props, {name: found[name] for name in _KEPT if found[name] is not None}


def started_with(target: Target) -> Settings:
    """Reads the environment of the server's process, where this user may."""
    pid = next(iter(target.pids), None)
    environment = processes.process_environment(pid) if pid is not None else {}
    return settings_of(
        target.argv, {name: environment[name] for name in VARIABLES if name in environment}
    )


class SettingsOf:
    """Remembers the answer for one life of the engine."""

    def __init__(self, target: Callable[[], Target]) -> None:
        self._target = target
        self._for: Target | None = None
        self._settings = Settings()

    def __call__(self) -> Settings:
        """For the engine as it is now."""
        target = self._target()
        if target is not self._for:
            self._for, self._settings = target, started_with(target)
        return self._settings


def boot_values(target: Target) -> dict[str, float]:
    """Knobs of a llama.cpp at its start, as far as they can be told; empty for other engines."""
    if target.engine != _ENGINE:
        return {}
    settings = started_with(target)
    told = {
        "chunk_tokens": settings.batch_tokens,
        "ubatch_tokens": settings.ubatch_tokens,
        "max_running_requests": target.settings.get("slots"),
    }
    return {name: float(value) for name, value in told.items() if value is not None}

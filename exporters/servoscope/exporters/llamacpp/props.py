"""llama.cpp's ``GET /props``: which build serves what, and how many requests at once. Pure.

Read by a list of names: the chat template, sampling defaults and whatever else a build adds are
not looked at. The question neither wakes a server that sleeps nor puts its sleep off, so it may
be asked at any time. Without ``--props`` only POST is off. A server with ``--api-key`` wants the
key for it, and one that loads its model answers 503.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from servoscope.exporters.plausibility import MAX_TOKENS, Refused
from servoscope.exporters.table import parse_version

__all__ = ["Props", "build_of", "read_props"]

_MAX_SLOTS = 4_096
_MAX_NAME = 128
_MAX_PATH = 4_096
_UNKNOWN_BUILD = (0,)


@dataclass(frozen=True, slots=True)
class Props:
    """``None``: this build does not say, or what it said was refused.

    ``slots`` is how many requests run at once, ``slot_context_tokens`` the context of one of them.
    ``sleeping`` is not ``None`` in builds that can unload their model (``--sleep-idle-seconds``).
    """

    build: str | None = None
    model_path: str | None = None
    model_alias: str | None = None
    slots: int | None = None
    slot_context_tokens: int | None = None
    sleeping: bool | None = None
    slots_endpoint: bool | None = None
    metrics_endpoint: bool | None = None
    refused: tuple[Refused, ...] = field(default=())


def read_props(told: object) -> Props:
    """What the parsed answer says. Raises ValueError, naming the field, when it is no /props."""
    if not isinstance(told, Mapping):
        raise ValueError("the answer is no JSON object")  # noqa: TRY004 - an engine's, not a caller's
    if "total_slots" not in told:
        raise ValueError("total_slots: missing")
    refused: list[Refused] = []
    defaults = told.get("default_generation_settings")
    slots = _count(told, "total_slots", 1, _MAX_SLOTS, refused)
    context = _count(defaults, "n_ctx", 1, MAX_TOKENS, refused)
    return Props(
        build=build_of(told.get("build_info")),
        model_path=_text(told.get("model_path"), _MAX_PATH),
        model_alias=_text(told.get("model_alias"), _MAX_NAME),
        slots=slots,
        slot_context_tokens=context,
        sleeping=_flag(told, "is_sleeping"),
        slots_endpoint=_flag(told, "endpoint_slots"),
        metrics_endpoint=_flag(told, "endpoint_metrics"),
        refused=tuple(refused),
    )


def build_of(told: object) -> str | None:
    """``"b11549-1a2b3c4"`` as it is; ``None`` for ``"b0-unknown"``, a build made outside git."""
    text = _text(told, _MAX_NAME)
    return None if text is None or parse_version(text) in (None, _UNKNOWN_BUILD) else text


def _count(told: object, name: str, least: int, most: int, refused: list[Refused]) -> int | None:
    value = told.get(name) if isinstance(told, Mapping) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        refused.append(Refused(name, type(value).__name__, "not a whole number"))
        return None
    if not least <= value <= most:
        refused.append(Refused(name, repr(value)[:32], f"outside {least}..{most}"))
        return None
    return value


def _flag(told: Mapping[str, Any], name: str) -> bool | None:
    value = told.get(name)
    return value if isinstance(value, bool) else None


def _text(told: object, limit: int) -> str | None:
    return told if isinstance(told, str) and 0 < len(told) <= limit else None

"""One function a field of a spec: from what YAML gave to a checked value, or SpecError. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from servoscope.alerts.duration import format_duration, parse_duration
from servoscope.alerts.objective import WHERE_LABELS, WINDOWS_SECONDS, Sli
from servoscope.alerts.problems import Problems, SpecError

__all__ = [
    "parse_choice",
    "parse_mapping",
    "parse_name",
    "parse_target",
    "parse_threshold",
    "parse_where",
    "parse_window",
]

MIN_TARGET, MAX_TARGET = 0.5, 0.99999
MIN_THRESHOLD_SECONDS, MAX_THRESHOLD_SECONDS = 0.001, 3600.0
MAX_WHERE_VALUES = 50
MAX_VALUE_CHARACTERS = 200
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")


def parse_mapping(
    value: object,
    path: str,
    allowed: tuple[str, ...],
    required: tuple[str, ...],
    problems: Problems,
) -> Mapping[str, Any]:
    """``value`` with its known keys; ``path`` is "" for the document.

    Unknown and missing keys are noted as problems. Raises SpecError when it is no mapping.
    """
    if not isinstance(value, Mapping):
        message = f"must be a mapping with the keys {', '.join(allowed)}"
        raise SpecError(path or "document", message)
    for key in value:
        if key not in allowed:
            problems.add(_join(path, key), f"is not a known key; {_nearest(str(key), allowed)}")
    for key in required:
        if key not in value:
            problems.add(_join(path, key), "is missing")
    return {key: value[key] for key in value if key in allowed}


def _join(path: str, key: object) -> str:
    shown = str(key)[:60] or '""'
    return f"{path}.{shown}" if path else shown


def _nearest(value: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value[:60], allowed, n=1, cutoff=0.5)
    listed = ", ".join(allowed)
    return f"did you mean {close[0]}? (known: {listed})" if close else f"known: {listed}"


def parse_choice(value: object, path: str, allowed: tuple[str, ...]) -> str:
    """One of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(path, f"{_show(value)} is not accepted; {_nearest(str(value), allowed)}")
    return value


def parse_name(value: object, path: str) -> str:
    """A name that is also a good label value and part of a rule group's name."""
    rule = "lower-case letters, digits and hyphens, 1 to 63 characters"
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not text; {rule}")
    if _NAME.match(value) is None:
        proposal = re.sub(r"[^a-z0-9]+", "-", value.lower())[:63].strip("-") or "objective"
        raise SpecError(path, f"{_show(value)} is not a name ({rule}); nearest: {proposal}")
    return value


def parse_threshold(raw: Mapping[str, Any], sli: Sli, path: str) -> float | None:
    """Seconds; None for an SLI without threshold."""
    value = raw.get("threshold")
    if not sli.is_latency:
        if value is not None:
            raise SpecError(path, f"{sli.value} has no threshold; remove it")
        return None
    if value is None:
        raise SpecError(path, f"is missing: {sli.value} needs one, for example 2s or 500ms")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise SpecError(path, f"{_show(value)} has no unit; nearest: {value:g}s")
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not a duration such as 2s or 500ms")
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise SpecError(path, str(error)) from error
    if not MIN_THRESHOLD_SECONDS <= seconds <= MAX_THRESHOLD_SECONDS:
        nearest = min(max(seconds, MIN_THRESHOLD_SECONDS), MAX_THRESHOLD_SECONDS)
        raise SpecError(path, f"{value} is outside 1ms..1h; nearest: {format_duration(nearest)}")
    return seconds


def parse_target(value: object, path: str) -> float:
    """A share of 1: ``99%``, ``"99%"`` or ``0.99``."""
    text = value.strip() if isinstance(value, str) else value
    try:
        if isinstance(text, str) and text.endswith("%"):
            ratio = round(float(text[:-1]) / 100.0, 9)
        elif isinstance(text, (str, int, float)) and not isinstance(text, bool):
            ratio = round(float(text), 9)
        else:
            raise SpecError(path, f"{_show(value)} is not a share such as 99% or 0.99")
    except (ValueError, OverflowError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(path, f"{_show(value)} is not a share such as 99% or 0.99") from error
    if not math.isfinite(ratio):
        raise SpecError(path, f"{_show(value)} is not a finite share; write 99% or 0.99")
    if isinstance(text, (int, float)) and 1 < ratio < 100:
        raise SpecError(path, f"{_show(value)} is more than everything; nearest: {ratio:g}%")
    if not MIN_TARGET <= ratio <= MAX_TARGET:
        nearest = min(max(ratio, MIN_TARGET), MAX_TARGET)
        why = "leaves no budget" if ratio > MAX_TARGET else "is no promise to page on"
        raise SpecError(
            path, f"{_show(value)} {why}; accepted: 50%..99.999%, nearest: {100 * nearest:g}%"
        )
    return ratio


def parse_window(value: object, path: str) -> int:
    """Seconds of one of the rolling windows."""
    allowed = ", ".join(format_duration(w) for w in WINDOWS_SECONDS)
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not a window; accepted: {allowed}")
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise SpecError(path, f"{error}; accepted: {allowed}") from error
    if seconds not in WINDOWS_SECONDS:
        nearest = min(WINDOWS_SECONDS, key=lambda w: abs(w - seconds))
        raise SpecError(
            path, f"{value} is not accepted ({allowed}); nearest: {format_duration(nearest)}"
        )
    return int(seconds)


def parse_where(value: object, sli: Sli, path: str) -> Mapping[str, tuple[str, ...]]:
    """Accepted values by label; TTFT and TPOT always say whether answers are streamed."""
    if not isinstance(value, Mapping):
        raise SpecError(path, "must be a mapping of label to value or list of values")
    where: dict[str, tuple[str, ...]] = {}
    problems = Problems()
    for label, given in value.items():
        values = problems.take(_where_label, label, given, f"{path}.{str(label)[:60]}")
        if values is not None:
            where[label] = values
    if "request_type" in where and "probe" in where["request_type"]:
        problems.add(f"{path}.request_type", "probe is in no objective; remove it")
    streaming = where.get("streaming")
    if streaming is not None and not set(streaming) <= {"true", "false"}:
        problems.add(f"{path}.streaming", "accepted: true or false")
    elif sli.is_token_milestone and streaming is not None and len(streaming) > 1:
        # Without streaming the first token is the whole answer: one SLI must not hold both.
        problems.add(
            f"{path}.streaming",
            f"{sli.value} of streamed and whole answers are separate SLIs; "
            "nearest: streaming: true, and a second objective for false",
        )
    problems.end()
    if sli.is_token_milestone:
        where.setdefault("streaming", ("true",))
    return MappingProxyType(where)


def _where_label(label: object, given: object, path: str) -> tuple[str, ...]:
    if label not in WHERE_LABELS:
        raise SpecError(path, f"is not a label to select on; {_nearest(str(label), WHERE_LABELS)}")
    values = given if isinstance(given, list) else [given]
    if not 1 <= len(values) <= MAX_WHERE_VALUES:
        raise SpecError(path, f"has {len(values)} values; accepted: 1 to {MAX_WHERE_VALUES}")
    return tuple(dict.fromkeys(_where_value(value, path) for value in values))


def _where_value(value: object, path: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise SpecError(path, f'{_show(value)} is not text; write it in quotes: "{value}"'[:300])
    if len(value) > MAX_VALUE_CHARACTERS or not value.isprintable():
        raise SpecError(path, f"must be printable, of at most {MAX_VALUE_CHARACTERS} characters")
    return value


def _show(value: object) -> str:
    return repr(value)[:60]

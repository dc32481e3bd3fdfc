"""Durations and ratios as people write them in a spec, and as Prometheus writes them. Pure."""

from __future__ import annotations

import re

__all__ = ["format_duration", "parse_duration", "prometheus_duration"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?(ms|s|m|h|d|w)\Z")


def parse_duration(text: str) -> float:
    """Seconds of ``2s``, ``500ms``, ``1.5s``, ``5m``, ``6h``, ``30d``, ``4w``.

    Raises ValueError when the text has no unit or another form.
    """
    found = _DURATION.match(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a duration such as 500ms, 2s, 5m or 30d")
    # Decimal digits times the unit, rounded to the nanosecond: 0.1 + 0.2 never shows in a rule.
    return round(float(found[1]) * _UNITS[found[2]], 9)


def format_duration(seconds: float) -> str:
    """The shortest exact form with one unit: 0.5 -> ``500ms``, 2 -> ``2s``, 2592000 -> ``30d``."""
    for unit in ("d", "h", "m", "s"):
        count = seconds / _UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    milliseconds = round(seconds * 1000.0, 6)
    if seconds < 1.0:
        return f"{milliseconds:.12g}ms"
    return f"{seconds:.12g}s"


def prometheus_duration(seconds: float) -> str:
    """A range for PromQL, in whole seconds or more: 300 -> ``5m``, 5400 -> ``90m``.

    Raises ValueError for a fraction of a second: no scrape is that fast.
    """
    if seconds < 1 or seconds != int(seconds):
        raise ValueError(f"a PromQL range is a whole number of seconds, not {seconds!r}")
    return format_duration(seconds)

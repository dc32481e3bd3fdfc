"""SGLang's load report (``GET /v1/loads``, from 0.5.9 on) as an EngineSample. Pure.

``/metrics`` tells running, waiting and KV usage as they were when the scheduler last logged: once
in ``--decode-log-interval`` (40) decode steps, and while it idles the last value stays. This report
is fresher: up to 0.5.12 the scheduler answers it itself between two steps; later it is a snapshot
that the scheduler leaves behind every 15 decode steps, at each prefill, every 0.05 s while it can
run nothing, and when it falls idle. A snapshot of work in hand that has grown old means that the
scheduler stands still; ``age_seconds`` tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from servoscope.exporters.plausibility import MAX_TOKENS, Refused
from servoscope.exporters.records import EngineSample, Reading

__all__ = ["SIGNALS", "Loads", "read_loads"]

#: (signal of ours, their name, largest believed)
_FIELDS = (
    ("running", "num_running_reqs", MAX_TOKENS),
    ("waiting", "num_waiting_reqs", MAX_TOKENS),
    ("kv_usage_ratio", "token_usage", 1.0),
)
SIGNALS = tuple(signal for signal, _, _ in _FIELDS)
_MAX_RANKS = 4_096
_MAX_MOMENT = 1e12  # seconds since the epoch
_SLACK = 0.01  # usage is rounded


@dataclass(frozen=True, slots=True)
class Loads:
    """``sample`` has one reading a signal and DP rank. ``age_seconds``: of the oldest snapshot of
    work in hand; ``None`` when there is no work, or the version does not say."""

    sample: EngineSample
    age_seconds: float | None = None


def read_loads(text: str | bytes) -> Loads:
    """Read one answer. Raises ValueError, naming what is wrong, when it is no load report."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("the answer is no JSON") from None
    loads = told.get("loads") if isinstance(told, dict) else None
    if not isinstance(loads, list) or not loads:
        raise ValueError("loads: no list of the load of one scheduler or more")
    if len(loads) > _MAX_RANKS:
        raise ValueError(f"loads: more than {_MAX_RANKS} ranks")
    readings: list[Reading] = []
    refused: list[Refused] = []
    ages: list[float] = []
    answered = _moment(told.get("timestamp"))
    for place, load in enumerate(loads):
        if not isinstance(load, Mapping):
            refused.append(Refused(f"loads[{place}]", type(load).__name__, "not an object"))
            continue
        told_now = _take(load, place, readings, refused)
        at = load.get("timestamp")
        if not isinstance(at, (int, float)) or not 0 < at < _MAX_MOMENT:
            continue
        if told_now and answered is not None:
            ages.append(max(0.0, answered - at))
    version = told.get("version")
    sample = EngineSample(
        engine="sglang",
        version=version[:64] if isinstance(version, str) else None,
        readings=tuple(readings),
        refused=tuple(refused),
    )
    return Loads(sample, max(ages) if ages else None)


def _take(
    load: Mapping[str, Any], place: int, readings: list[Reading], refused: list[Refused]
) -> bool:
    """The readings of one rank; returns whether it has work in hand."""
    rank = load.get("dp_rank", place)
    labels = (("rank", str(rank)),) if isinstance(rank, int) else ()
    busy = False
    for signal, name, most in _FIELDS:
        value = load.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refused.append(Refused(name, type(value).__name__, "not a number"))
        elif not 0 <= value <= most * (1 + _SLACK):  # NaN is neither
            refused.append(Refused(name, repr(value)[:32], f"outside 0..{most:g}"))
        else:
            readings.append(Reading(signal, min(float(value), float(most)), labels))
            busy = busy or (signal != "kv_usage_ratio" and value > 0)
    return busy


def _moment(told: object) -> float | None:
    if not isinstance(told, str):
        return None
    try:
        return datetime.fromisoformat(told).timestamp()
    except (ValueError, OverflowError):  # a year that no clock has
        return None

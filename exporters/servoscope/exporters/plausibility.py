"""What a request record cannot be: impossible values are refused one by one, the rest is kept.

A request that never reached a milestone can read a latency as large as the host's uptime (fault 5
of the field's known ones); such a value must never enter a histogram. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servoscope.exporters.records import RequestRecord

__all__ = ["COUNT_FIELDS", "DURATION_FIELDS", "MAX_TOKENS", "Refused", "implausible"]

MAX_TOKENS = 100_000_000
CLOCK_SKEW_SECONDS = 60.0  # an end this far ahead of our clock is another clock, not the future
DURATION_FIELDS = (
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "time_to_first_token_seconds",
    "time_to_first_answer_seconds",
    "time_per_output_token_seconds",
    "max_inter_token_seconds",
    "e2e_seconds",
)
COUNT_FIELDS = (
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "max_output_tokens",
    "preemptions",
)
_MOMENTS = ("received_unix_seconds", "first_token_unix_seconds", "finished_unix_seconds")


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that was read and not believed: which, what it was, and why."""

    name: str
    value: str
    why: str


def implausible(record: RequestRecord, now: float, max_seconds: float) -> list[Refused]:
    """Replace impossible values of ``record`` by ``None`` and say which and why.

    Args:
        record: changed in place.
        now: wall-clock seconds since the epoch.
        max_seconds: longest duration that is believed.
    """
    refused: list[Refused] = []
    for checks in (_numbers(record, now, max_seconds), _relations(record)):
        for name, why in checks:
            refused.append(Refused(name, repr(getattr(record, name))[:64], why))
            setattr(record, name, None)
    gaps = tuple(g for g in record.inter_token_seconds if 0.0 <= g <= max_seconds)
    if bad := len(record.inter_token_seconds) - len(gaps):
        refused.append(
            Refused("inter_token_seconds", f"{bad} gaps", f"outside 0..{max_seconds:g} s")
        )
        record.inter_token_seconds = gaps
    return refused


def _numbers(record: RequestRecord, now: float, max_seconds: float) -> Iterator[tuple[str, str]]:
    """Fields that are wrong by themselves."""
    for names, least, most, why in (
        (DURATION_FIELDS, 0.0, max_seconds, f"longer than {max_seconds:g} s"),
        (_MOMENTS, 0.0, now + CLOCK_SKEW_SECONDS, "in the future"),
    ):
        for name in names:
            value = getattr(record, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                yield name, "not a number"
            elif isinstance(value, float) and not math.isfinite(value):
                yield name, "not a finite number"
            elif value < least:
                yield name, "negative"
            elif value > most:
                yield name, why
    for name in COUNT_FIELDS:
        value = getattr(record, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            yield name, "not a whole number"
        elif not 0 <= value <= MAX_TOKENS:
            yield name, f"outside 0..{MAX_TOKENS}"


def _relations(record: RequestRecord) -> Iterator[tuple[str, str]]:
    """Fields that contradict another. Runs after the single ones were cleared."""
    received, finished = record.received_unix_seconds, record.finished_unix_seconds
    if received is not None and finished is not None and finished < received:
        yield "finished_unix_seconds", "before received_unix_seconds"
    cached, prompt = record.cached_tokens, record.prompt_tokens
    if cached is not None and prompt is not None and cached > prompt:
        yield "cached_tokens", "more than prompt_tokens"
    first, whole = record.time_to_first_token_seconds, record.e2e_seconds
    # Two clocks may be involved: a thousandth and a millisecond are rounding, not contradiction.
    if first is not None and whole is not None and first > 1.001 * whole + 0.001:
        yield "time_to_first_token_seconds", "longer than e2e_seconds"

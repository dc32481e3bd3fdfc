"""What one finished request counts for in one objective: the outcome table, as code. Pure.

| outcome                         | error_ratio | e2e      | TTFT, TPOT                      |
|---------------------------------|-------------|----------|---------------------------------|
| completed, length               | good        | by value | by value; TPOT from 2 tokens on |
| error, timeout, stuck, rejected | bad         | bad      | good if the milestone was       |
|                                 |             |          | reached in time, else bad       |
| client_error                    | left out    | left out | left out                        |
| client_disconnect, cancelled    | left out    | so far   | so far, per milestone           |
|   with ``disconnects: bad``     | bad         | bad      | as an error                     |
| unknown                         | left out    | left out | left out                        |

"So far", when the client leaves: e2e is good while the time that had passed is within the threshold
and bad once it is above. A milestone that was reached counts by its value; one that was not is bad
once the threshold had passed, and else nobody can say: ``censored``. A value that the source could
not see is left out, never guessed. ``probe`` is in no SLI; embeddings, rerank and score requests
generate nothing, so they have no TTFT and no TPOT.

``over`` says that the request took longer than 1.5 x the threshold: by the value where there is
one, else by the time it had waited for it. Only five verdicts exist, and in each good implies
counted and over implies counted and not good: good <= total and good + over <= total hold by
construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from servoscope.alerts.spec import OVER_FACTOR, Disconnects, Objective, Sli
from servoscope.exporters.records import Outcome, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PROBE", "Verdict", "applies", "label_value", "meets_all", "verdict"]

PROBE = "probe"
MIN_TOKENS_FOR_PACE = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request in one objective. ``over``: above 1.5 x the threshold."""

    counted: bool
    good: bool
    over: bool
    censored: bool


LEFT_OUT = Verdict(counted=False, good=False, over=False, censored=False)
CENSORED = Verdict(counted=False, good=False, over=False, censored=True)
GOOD = Verdict(counted=True, good=True, over=False, censored=False)
BAD = Verdict(counted=True, good=False, over=False, censored=False)
FAR_OVER = Verdict(counted=True, good=False, over=True, censored=False)


class _End(Enum):
    """The three ways of ending that an SLI can count."""

    WELL = 1
    FAILED = 2
    LEFT = 3  # the client went away


#: client_error and unknown are missing on purpose: they are in no SLI.
_ENDS = {
    Outcome.COMPLETED: _End.WELL,
    Outcome.LENGTH: _End.WELL,
    Outcome.ERROR: _End.FAILED,
    Outcome.TIMEOUT: _End.FAILED,
    Outcome.STUCK: _End.FAILED,
    Outcome.REJECTED: _End.FAILED,
    Outcome.CLIENT_DISCONNECT: _End.LEFT,
    Outcome.CANCELLED: _End.LEFT,
}
_BY_END = {_End.WELL: GOOD, _End.FAILED: BAD, _End.LEFT: LEFT_OUT}

#: Last path segments of requests that generate no tokens, as the engines name them.
_NO_TOKENS_ENDPOINTS = frozenset(
    {
        "classify", "embed", "embed_all", "embedding", "embeddings", "encode", "pooling", "predict",
        "rerank", "reranking", "score", "similarity",
    }
)  # fmt: skip
_NO_TOKENS_TYPES = frozenset({"embedding", "embeddings", "rerank", "score"})


def verdict(objective: Objective, record: RequestRecord) -> Verdict:
    """What ``record`` counts for in ``objective``. Never raises for a well-typed record."""
    end = _ENDS.get(record.outcome)
    if end is None or not applies(objective, record):
        return LEFT_OUT
    if end is _End.LEFT and objective.disconnects is Disconnects.BAD:
        end = _End.FAILED
    threshold = objective.threshold_seconds
    if threshold is None or not objective.sli.is_latency:
        return _BY_END[end]
    elapsed = _seconds(record.e2e_seconds)
    if objective.sli is Sli.E2E:
        return _e2e(elapsed, threshold, end)
    reached = _milestone(objective.sli, record)
    if reached is not None:
        return _by_value(reached, threshold)
    if end is _End.WELL:
        return LEFT_OUT
    waited = _waited(objective.sli, record, elapsed, threshold)
    return waited or (BAD if end is _End.FAILED else CENSORED)


def meets_all(objectives: Iterable[Objective], record: RequestRecord) -> bool | None:
    """Goodput: True if every objective that counts ``record`` is met, None if none counts it."""
    counted = False
    for objective in objectives:
        found = verdict(objective, record)
        if found.counted:
            if not found.good:
                return False
            counted = True
    return True if counted else None


def applies(objective: Objective, record: RequestRecord) -> bool:
    """Whether ``record`` is of the kind that ``objective`` speaks about, however it ended."""
    if record.request_type == PROBE:
        return False
    if objective.sli.is_token_milestone and not _generates(record):
        return False
    return all(
        label_value(record, label) in accepted for label, accepted in objective.where.items()
    )


def label_value(record: RequestRecord, label: str) -> str:
    """The value of a ``where`` label. Streaming reads true, false, or unknown when not seen."""
    if label == "streaming":
        if record.streaming is None:
            return "unknown"
        return "true" if record.streaming else "false"
    return str(getattr(record, label))


def _generates(record: RequestRecord) -> bool:
    if record.request_type in _NO_TOKENS_TYPES:
        return False
    endpoint = record.endpoint
    if endpoint is None:
        return True
    return endpoint.rstrip("/").rpartition("/")[2] not in _NO_TOKENS_ENDPOINTS


def _seconds(value: float | None) -> float | None:
    """A duration that can be believed, else None (fault 5: as large as the uptime, negative)."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _milestone(sli: Sli, record: RequestRecord) -> float | None:
    if sli is Sli.TIME_TO_FIRST_TOKEN:
        return _seconds(record.time_to_first_token_seconds)
    if record.output_tokens is not None and record.output_tokens < MIN_TOKENS_FOR_PACE:
        return None  # engines write 0 s a token for answers of one token (fault 6)
    return _seconds(record.time_per_output_token_seconds)


def _by_value(seconds: float, threshold: float) -> Verdict:
    if seconds <= threshold:
        return GOOD
    return FAR_OVER if seconds > OVER_FACTOR * threshold else BAD


def _e2e(elapsed: float | None, threshold: float, end: _End) -> Verdict:
    if elapsed is None:
        return {_End.WELL: LEFT_OUT, _End.FAILED: BAD, _End.LEFT: CENSORED}[end]
    by_value = _by_value(elapsed, threshold)
    # A failure is never in time, however fast it was; only its lateness goes by value.
    return BAD if end is _End.FAILED and by_value.good else by_value


def _waited(
    sli: Sli, record: RequestRecord, elapsed: float | None, threshold: float
) -> Verdict | None:
    """The verdict where the wait for a milestone was itself too long, else None."""
    if sli is not Sli.TIME_TO_FIRST_TOKEN or elapsed is None:
        return None  # a pace needs two tokens: one gap is no mean
    if record.output_tokens:  # tokens came, and the source did not see when the first did
        return None
    by_value = _by_value(elapsed, threshold)
    return None if by_value.good else by_value

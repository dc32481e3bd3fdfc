"""One request of SGLang out of the spans that were found for it (``spans`` finds them). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from servoscope.exporters.otlp import AttributeValue, Span
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.sglang.finish import outcome_of
from servoscope.exporters.sglang.values import whole

__all__ = ["ATTRIBUTES", "Stages", "lost_record", "request_record"]

_USAGE = "gen_ai.usage."
_LATENCY = "gen_ai.latency."
#: Attributes that are looked at; a span may hold others, with what people wrote.
ATTRIBUTES = frozenset({
    "rid", "module", "tp_rank", "dp_rank", "type", "status_code", "message", "reason",
    "gen_ai.request.max_tokens", "gen_ai.request.n", "gen_ai.response.model",
    "gen_ai.response.finish_reasons",
    f"{_USAGE}prompt_tokens", f"{_USAGE}completion_tokens", f"{_USAGE}cached_tokens",
    f"{_LATENCY}time_to_first_token", f"{_LATENCY}e2e", f"{_LATENCY}time_in_model_decode",
})  # fmt: skip


@dataclass(slots=True)
class Stages:
    """What came for one scheduler thread."""

    since: float
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


def lost_record(root_id: str, threads: list[Span]) -> RequestRecord:
    """The scheduler was done with it, and what the front end knew of it never came."""
    return RequestRecord(
        request_id=root_id,
        source=Source.OTLP,
        outcome=Outcome.UNKNOWN,
        engine="sglang",
        rank=_rank(threads),
        finish_reason="lost_root_span",
    )


def request_record(root: Span, threads: list[Span], stages: Stages) -> RequestRecord | None:
    """What root, scheduler threads and stages tell; ``None`` when it is no request of a client."""
    told = root.attributes
    outcome, finish, status = _outcome(root, threads)
    tokens = whole(told.get(f"{_USAGE}completion_tokens"))
    samples = whole(told.get("gen_ai.request.n"))
    if outcome is Outcome.LENGTH and tokens == 0 and samples is not None and samples > 1:
        return None  # the engine's own pass over a prompt before it samples it n times
    if outcome is Outcome.UNKNOWN and tokens is None and stages.prefill_seconds is not None:
        return None  # what was sampled n times: it has no answer of its own, each sample has
    received = root.start_nanoseconds / 1e9 if root.start_nanoseconds else None
    first = _seconds(told.get(f"{_LATENCY}time_to_first_token"))
    decode = _seconds(told.get(f"{_LATENCY}time_in_model_decode"))
    paced = decode is not None and tokens is not None and tokens >= 2
    known_end = outcome is not Outcome.UNKNOWN
    return RequestRecord(
        request_id=str(told.get("rid") or root.span_id)[:128],
        source=Source.OTLP,
        outcome=outcome,
        phase=_phase(outcome, tokens, stages),
        finish_reason=finish,
        status_code=status,
        engine="sglang",
        rank=_rank(threads),
        model_name=str(told.get("gen_ai.response.model") or "unknown")[:128],
        received_unix_seconds=received,
        first_token_unix_seconds=None if received is None or first is None else received + first,
        finished_unix_seconds=root.end_nanoseconds / 1e9 if root.end_nanoseconds else None,
        queue_seconds=stages.queue_seconds,
        prefill_seconds=stages.prefill_seconds if tokens is not None else None,
        decode_seconds=decode if paced else None,
        time_to_first_token_seconds=first if tokens else None,
        time_per_output_token_seconds=(
            decode / (tokens - 1) if paced and decode is not None and tokens else None
        ),
        e2e_seconds=_seconds(told.get(f"{_LATENCY}e2e")) if known_end else None,
        prompt_tokens=whole(told.get(f"{_USAGE}prompt_tokens")),
        output_tokens=tokens,
        cached_tokens=whole(told.get(f"{_USAGE}cached_tokens")),
        max_output_tokens=whole(told.get("gen_ai.request.max_tokens")),
    )


def _outcome(root: Span, threads: list[Span]) -> tuple[Outcome, str | None, int | None]:
    """The root's reason; an abort's status is on the scheduler's thread, where it is at all."""
    kind = _reason(root.attributes.get("gen_ai.response.finish_reasons"))
    failed = next((t for t in threads if t.failed), None)
    if failed is not None and kind in (None, "abort"):
        told: dict[str, AttributeValue] = dict(failed.attributes)
        told.setdefault("message", told.get("reason", ""))
        return outcome_of({**told, "type": "abort"})
    if kind is None:
        return Outcome.UNKNOWN, None, None
    try:
        return outcome_of(kind)
    except ValueError:
        return Outcome.UNKNOWN, None, None


def _reason(told: AttributeValue | None) -> str | None:
    """``'["length"]'`` → ``length``."""
    try:
        listed = json.loads(told) if isinstance(told, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        return None
    return listed[0][:32]


def _phase(outcome: Outcome, tokens: int | None, stages: Stages) -> Phase:
    if outcome in (Outcome.COMPLETED, Outcome.LENGTH) or tokens:
        return Phase.DECODE
    if stages.queue_seconds is not None:
        return Phase.PREFILL
    return Phase.UNKNOWN


def _rank(threads: list[Span]) -> int | None:
    return whole(threads[0].attributes.get("dp_rank")) if threads else None


def _seconds(value: AttributeValue | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if value >= 0 else None

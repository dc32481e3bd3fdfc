"""From vLLM's request states to one message a HTTP request. Pure; no prompt or answer text.

Definitions (vLLM 0.9 to 0.33; same clocks as vLLM's own histograms)
- received: wall clock when the last bytes of the HTTP request came to the API server's socket, or,
  where the socket does not tell, when the API server had read them (http_exchange, socket_wait);
  where neither is known, ``arrival_time``, when it began to render the prompt (before
  tokenisation).
- time to first token: received to the API server handling the first output (arrival_time +
  first_token_latency); of a streamed answer to the send of its first chunk, where that is known
  (``delivery.first_token_at``).
- queue, prefill, decode: engine core's monotonic clock: QUEUED to first SCHEDULED, to first token,
  to last token. Tokenisation and the way between the processes are in TTFT, not in the queue.
- time per output token: decode / (output tokens - 1), None below two output tokens.

vLLM runs one engine request for each of ``n`` samples and for each prompt of a list; ``merged``
makes one message of the parts of one HTTP request.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servoscope.exporters.records import Outcome, Phase

__all__ = [
    "MAX_GAPS",
    "Gaps",
    "Part",
    "endpoint_of",
    "is_beam",
    "merged",
    "outcome_of_finish",
    "part_of",
    "response_id",
    "streaming_of",
]

MAX_GAPS = 512  # kept gaps between tokens of one request; the largest is kept whatever happens

#: Served at these paths the engine's id is ``<prefix><request>-<index of the prompt>``.
_NUMBERED = {
    "cmpl-": "/v1/completions",
    "embd-": "/v1/embeddings",
    "pooling-": "/pooling",
    "classify-": "/classify",
    "score-": "/score",
    "rerank-": "/rerank",
    "generative-scoring-": "/generative_scoring",
}
_PLAIN = {
    "chatcmpl-": "/v1/chat/completions",
    "resp_": "/v1/responses",
    "transcribe-": "/v1/audio/transcriptions",
    "translate-": "/v1/audio/translations",
}
_INDEX = re.compile(r"^(.+)-(\d{1,6})$")
_BEAM = re.compile(r"-[0-9a-f]{16,32}-beam-\d+$|^beam_search-")

_FINISH = {
    "stop": Outcome.COMPLETED,
    "length": Outcome.LENGTH,
    "abort": Outcome.CANCELLED,  # ended in the engine: paused, or its abort call
    "error": Outcome.ERROR,
    "repetition": Outcome.COMPLETED,  # the engine cut a repeating answer; the client got it
}
#: When parts of one HTTP request end differently, the first of these that occurs is its outcome.
_WORST = (
    Outcome.ERROR, Outcome.CLIENT_DISCONNECT, Outcome.CANCELLED, Outcome.UNKNOWN, Outcome.LENGTH,
    Outcome.COMPLETED,
)  # fmt: skip
_PHASE_ORDER = (Phase.DECODE, Phase.PREFILL, Phase.QUEUED, Phase.UNKNOWN)


def response_id(external_id: str) -> tuple[str, int | None]:
    """The id the client sees, and which prompt of a list this is (None: not numbered)."""
    for prefix in _NUMBERED:
        if external_id.startswith(prefix) and (match := _INDEX.match(external_id)):
            return match[1], int(match[2])
    return external_id, None


def endpoint_of(external_id: str) -> str | None:
    """URL path by the prefix vLLM gives the id; None for one we do not know."""
    for prefix, path in (*_NUMBERED.items(), *_PLAIN.items()):
        if external_id.startswith(prefix):
            return path
    return None


def is_beam(external_id: str) -> bool:
    """One of the many one-token requests that beam search makes of a single HTTP request."""
    return _BEAM.search(external_id) is not None


def outcome_of_finish(reason: str) -> Outcome:
    """Outcome of a request that the engine finished. A reason we do not know is UNKNOWN."""
    return _FINISH.get(reason, Outcome.UNKNOWN)


class Gaps:
    """Gaps between the outputs of one request: the first MAX_GAPS, the largest, the rest counted.

    float32, so that a full buffer of full requests stays near 20 MB.
    """

    __slots__ = ("beyond", "longest", "values")

    def __init__(self) -> None:
        self.values = array("f")
        self.longest = 0.0
        self.beyond = 0

    def add(self, seconds: float) -> None:
        """One gap."""
        self.longest = max(self.longest, seconds)
        if len(self.values) < MAX_GAPS:
            self.values.append(seconds)
        else:
            self.beyond += 1


@dataclass(slots=True, kw_only=True)
class Part:
    """One engine request at its end."""

    outcome: Outcome
    phase: Phase
    finish_reason: str | None
    received: float
    finished: float
    prompt_index: int = 0
    first_token: float | None = None  # wall clock
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    inference: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    max_tokens: int | None = None
    preemptions: int = 0
    streaming: bool | None = None
    pooling: bool = False
    lora: str | None = None
    priority: int = 0
    gaps: Gaps | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first."""
        if self.decode is None or self.output_tokens < 2:
            return None
        return self.decode / (self.output_tokens - 1)


def _between(start: float, end: float) -> float | None:
    """Seconds between two engine-core stamps; None when one of them never came (0.0)."""
    return end - start if start > 0.0 and end > 0.0 else None


def streaming_of(state: Any) -> bool | None:
    """DELTA is a streamed answer, FINAL_ONLY is not; CUMULATIVE (library use) says nothing."""
    name = getattr(getattr(state, "output_kind", None), "name", "")
    return {"DELTA": True, "FINAL_ONLY": False}.get(name)


def lora_of(state: Any) -> str | None:
    """Name of the LoRA adapter, which is also the model name the client asked for."""
    name = getattr(state, "lora_name", None)
    return None if name is None else str(name)


def part_of(
    state: Any,
    *,
    outcome: Outcome,
    phase: Phase,
    finish_reason: str | None,
    finished: float,
    received: float | None = None,
    priority: int = 0,
    prompt_index: int = 0,
) -> Part:
    """A Part from vLLM's RequestState. ``received``, ``finished``: wall-clock seconds."""
    stats = state.stats
    decoding = not state.is_prefilling
    outputs = int(stats.num_generation_tokens)
    had_first = decoding and outputs > 0
    latency = float(getattr(stats, "first_token_latency", 0.0))  # 0.9: see hooks._first_output
    prompt = getattr(state, "prompt_len", None)
    return Part(
        outcome=outcome,
        phase=phase,
        finish_reason=finish_reason,
        received=float(stats.arrival_time) if received is None else received,
        finished=finished,
        prompt_index=prompt_index,
        first_token=float(stats.arrival_time) + latency if had_first else None,
        queue=_between(stats.queued_ts, stats.scheduled_ts),
        prefill=_between(stats.scheduled_ts, stats.first_token_ts),
        decode=_between(stats.first_token_ts, stats.last_token_ts) if had_first else None,
        inference=_between(stats.scheduled_ts, stats.last_token_ts),
        prompt_tokens=None if prompt is None else int(prompt),
        output_tokens=outputs,
        cached_tokens=_cached(state) if decoding else None,
        max_tokens=getattr(state, "max_tokens_param", None),
        preemptions=int(getattr(stats, "num_preemptions", 0)),
        streaming=streaming_of(state),
        pooling=getattr(state, "detokenizer", None) is None and outputs == 0,
        lora=lora_of(state),
        priority=priority,
        gaps=getattr(stats, "servoscope_gaps", None),
    )


def _cached(state: Any) -> int | None:
    # Before 0.10.2 the state does not have it; the hook notes it of the first output.
    noted = getattr(state.stats, "servoscope_cached_tokens", None)
    value = getattr(state, "num_cached_tokens", noted)
    return None if value is None or value < 0 else int(value)


def merged(
    parts: Sequence[Part], ident: str, *, rank: int | None, estimated: bool
) -> dict[str, Any]:
    """One message for the parts of one HTTP request.

    Tokens: prompts counted once each however many samples were drawn, cached tokens as of the
    sample that finished last (what vLLM's usage says), outputs summed. TPOT is per sample:
    all decode time over all tokens after a first. Queue and prefill are of the part that had
    the first token. ``estimated``: the phase is an estimate (see open_requests).
    """
    last = parts[-1]
    firsts = [p for p in parts if p.first_token is not None]
    lead = min(firsts, key=_first_token) if firsts else parts[0]
    received = min(p.received for p in parts)
    finished = max(p.finished for p in parts)
    prompts = {p.prompt_index: p for p in parts}  # the last one finished of each prompt
    worst = next(p for o in _WORST for p in parts if p.outcome is o)
    after_first = sum(p.output_tokens - 1 for p in parts if p.tpot is not None)
    decoded = sum(p.decode or 0.0 for p in parts if p.tpot is not None)
    first = lead.first_token
    message: dict[str, Any] = {
        "type": "record",
        "request_id": ident,
        "endpoint": endpoint_of(ident),
        "outcome": worst.outcome.value,
        "finish_reason": worst.finish_reason,
        "phase": next(p for o in _PHASE_ORDER for p in parts if p.phase is o).phase.value,
        "phase_estimated": estimated,
        "rank": rank,
        "streaming": last.streaming,
        "pooling": all(p.pooling for p in parts),
        "lora": last.lora,
        "priority": last.priority,
        "choices": len(parts) // max(1, len(prompts)),
        "prompts": len(prompts),
        "received_unix_seconds": received,
        "first_token_unix_seconds": first,
        "ttft_by": "engine",
        "finished_unix_seconds": finished,
        "time_to_first_token_seconds": None if first is None else first - received,
        "time_per_output_token_seconds": decoded / after_first if after_first else None,
        "queue_seconds": lead.queue,
        "prefill_seconds": lead.prefill,
        "decode_seconds": _decode(parts, firsts),
        "inference_seconds": lead.inference if len(parts) == 1 else None,
        "e2e_seconds": finished - received,
        "prompt_tokens": _sum(p.prompt_tokens for p in prompts.values()),
        "output_tokens": sum(p.output_tokens for p in parts),
        "cached_tokens": _sum(p.cached_tokens for p in prompts.values()),
        "max_output_tokens": max((p.max_tokens for p in parts if p.max_tokens), default=None),
        "preemptions": sum(p.preemptions for p in parts),
    }
    message.update(_gaps(parts))
    return message


def _first_token(part: Part) -> float:
    return part.first_token if part.first_token is not None else float("inf")


def _decode(parts: Sequence[Part], firsts: Sequence[Part]) -> float | None:
    """First token of all to last token of all; engine-core time where there is one part."""
    if len(parts) == 1:
        return parts[0].decode
    ends = [p.first_token + p.decode for p in firsts if p.first_token and p.decode is not None]
    return max(ends) - min(map(_first_token, firsts)) if ends else None


def _sum(values: Any) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _gaps(parts: Sequence[Part]) -> dict[str, Any]:
    """Gaps of all parts, still as float32 arrays (the socket's thread makes JSON of them)."""
    found = [p.gaps for p in parts if p.gaps is not None]
    kept = found[0].values if len(found) == 1 else array("f")
    beyond = sum(g.beyond for g in found)
    if len(found) > 1:
        for gaps in found:
            room = MAX_GAPS - len(kept)
            kept.extend(gaps.values[:room])
            beyond += max(0, len(gaps.values) - room)
    return {
        "inter_token_seconds": kept,
        "inter_token_beyond": beyond,
        "max_inter_token_seconds": max((g.longest for g in found), default=None),
    }

"""From a finished call to its RequestRecord: the arithmetic of the intervals. Pure.

Definitions ("wire"): *received* is the last byte of the request; *first token* the first event that
carries a generated token; *end* the last byte of the response, or the last event when the client
left between that and the end of the framing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.asked import Asked
from servoscope.sidecar.wire.endpoints import Endpoint
from servoscope.sidecar.wire.outcome import End, phase_of

__all__ = ["Origin", "believed", "build_record"]

_CLOCK_SECONDS, _CLOCK_RATIO = 0.05, 0.01  # what two clocks may differ by


@dataclass(frozen=True, slots=True)
class Origin:
    """Who saw the request: which source, in front of which server."""

    source: Source
    server: str


class _Head(Protocol):
    hint: str | None
    tenant: str | None
    request_id: str | None


class _Call(Protocol):
    name: str
    endpoint: Endpoint | None
    asked: Asked
    answer: Answer
    received_at: float | None
    status: int | None

    @property
    def head(self) -> _Head: ...


@dataclass(frozen=True, slots=True)
class _Times:
    received: float | None
    first: float | None
    answer: float | None
    last: float | None
    end: float | None


def build_record(
    call: _Call, outcome: Outcome, end: End, at: float, origin: Origin, *, streamed: bool
) -> RequestRecord:
    """The record of ``call``, which ended with ``end`` at ``at``."""
    answer = call.answer
    times = _times(call, end, at, streamed=streamed)
    e2e = _between(times.received, times.end)
    # The engine's own intervals are of one sequence; several choices share one e2e.
    own = answer.sequences <= 1 and believed(answer, e2e)
    prefill = answer.engine_prefill_seconds if own else None
    decode = answer.engine_decode_seconds if own else None
    # So are its counts of a prompt, where the engine gives timings: of several prompts, one's.
    one_prompt = call.asked.prompts <= 1 or not answer.timed
    return RequestRecord(
        request_id=answer.response_id or call.head.request_id or call.name,
        source=origin.source,
        server=origin.server,
        outcome=outcome,
        phase=phase_of(outcome, answer),
        finish_reason=answer.finish_reason,
        status_code=call.status,
        model_name=answer.model_name or call.asked.model_name or "unknown",
        request_type_hint=call.head.hint,
        tenant=call.head.tenant or "",
        endpoint=call.endpoint.path if call.endpoint is not None else None,
        streaming=_streaming(call, streamed=streamed),
        received_unix_seconds=times.received,
        first_token_unix_seconds=times.first,
        finished_unix_seconds=times.end,
        queue_seconds=_queue(e2e, prefill, decode),
        prefill_seconds=prefill,
        decode_seconds=_between(times.first, times.last) if streamed else decode,
        time_to_first_token_seconds=_between(times.received, times.first),
        time_to_first_answer_seconds=_between(times.received, times.answer),
        time_per_output_token_seconds=_per_token(answer, times, decode, streamed=streamed),
        max_inter_token_seconds=answer.max_gap,
        e2e_seconds=e2e,
        inter_token_seconds=tuple(answer.gaps),
        prompt_tokens=answer.prompt_tokens if one_prompt else None,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens if one_prompt else None,
        max_output_tokens=call.asked.max_output_tokens,
    )


def believed(answer: Answer, e2e: float | None) -> bool:
    """Whether the engine's own intervals fit into what was seen on the wire, as they must."""
    if answer.sequences > 1 or e2e is None:
        return True
    told = (answer.engine_prefill_seconds or 0.0) + (answer.engine_decode_seconds or 0.0)
    return told <= e2e * (1 + _CLOCK_RATIO) + _CLOCK_SECONDS


def _times(call: _Call, end: End, at: float, *, streamed: bool) -> _Times:
    answer = call.answer
    finished: float | None = at
    if end is not End.COMPLETE and answer.terminal_at is not None:
        finished = answer.terminal_at
    elif end is End.LOST:
        finished = None  # when it ended nobody saw
    first, last = answer.first_token_at, answer.last_token_at
    if streamed and first is None and (answer.output_tokens or 0) > 0:
        # Its only token came without text of its own, with the finish reason.
        first = last = answer.finished_at
    first_answer = answer.first_answer_at
    if end is End.CLIENT_CLOSED and first is not None and first > at:
        first = last = first_answer = None  # sent after the client had gone
    return _Times(call.received_at, first, first_answer, last, finished)


def _streaming(call: _Call, *, streamed: bool) -> bool | None:
    """From the response where there is one; else what was asked for."""
    if streamed:
        return True
    if call.asked.streaming is not None:
        return call.asked.streaming
    return False if call.status is not None and call.status < 300 else None


def _queue(e2e: float | None, prefill: float | None, decode: float | None) -> float | None:
    """What the engine's own intervals leave of the whole (llama.cpp reports no queue time).

    From the end, not from the first token: the first *event* may be several tokens late.
    """
    if prefill is None or decode is None or e2e is None:
        return None
    return max(0.0, e2e - prefill - decode)


def _per_token(
    answer: Answer, times: _Times, decode: float | None, *, streamed: bool
) -> float | None:
    """(last - first token) / (output tokens - 1); unknown without a count, or for n > 1."""
    tokens = answer.output_tokens
    if tokens is None or tokens < 2 or answer.sequences > 1:
        return None
    spent = _between(times.first, times.last) if streamed else decode
    return None if spent is None else spent / (tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    if start is None or end is None or end < start:
        return None
    return end - start

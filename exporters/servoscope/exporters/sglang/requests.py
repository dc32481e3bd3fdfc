"""One line of SGLang's request file (``--export-metrics-to-file``) as a RequestRecord. Pure.

Which event starts and ends what (0.5.23; read in its sources, compared with clients in tests):

- received: the HTTP handler has the parsed body (OpenAI endpoints), or the tokenizer manager gets
  the request (/generate). Reading the body and HTTP before that are not in it.
- TTFT of a streamed answer ends where its first chunk is handed to the HTTP server
  (``response_sent_to_client_ts``); of any other at the end of prefill in the scheduler.
- queue: from the scheduler's waiting queue to the first forward pass (``queue_time``). From 0.5.23
  on that number holds the waits after retractions too; for a retracted request the time from its
  dispatch to its first forward pass is the bound, and the smaller one is taken.
- prefill: from the first forward pass to the end of prefill, both in the scheduler.
- TPOT and decode: from the first to the last token as the tokenizer manager sees them; of answers
  that are not streamed from the end of prefill, because it sees only every 50th of their tokens.
- e2e ends at the last token; the HTTP answer is written after it.

By version: 0.5.11 to 0.5.16 (run) tell neither the first forward pass, nor the end of prefill, nor
``first_token_latency``: no prefill time there, and neither TTFT nor TPOT of what is not streamed.
Up to 0.5.9 (read) the ends are named ``decode_finished_ts`` and ``prefill_finished_ts``, and
``decode_throughput`` counts the first token too; up to 0.5.11 retractions are
``total_retractions``. Without ``--enable-metrics`` there is no time but ``e2e_latency``.

What people wrote is in ``request_parameters`` unless the engine runs with ``--log-requests
--log-requests-level 0`` (or 1). It is parsed, a handful of values is taken, and the rest is let go;
a line, an error or a record cannot hold it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servoscope.exporters.plausibility import Refused
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.sglang.finish import outcome_of
from servoscope.exporters.sglang.values import Numbers, short_name, whole

__all__ = ["TEXT_PARAMETERS", "RequestLine", "read_line"]

#: Request parameters and answer fields that hold what people or the model wrote.
TEXT_PARAMETERS = (
    "text", "input_ids", "input_embeds", "prompt", "messages", "image_data", "video_data",
    "audio_data",
)  # fmt: skip
TEXT_FIELDS = (*TEXT_PARAMETERS, "output_ids", "output_text")
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What one line gave.

    ``record`` is ``None`` when it is no request of a client, and ``why`` says what it is. ``text``:
    what somebody wrote was in the line (and is in nothing that came of it).
    """

    record: RequestRecord | None
    text: bool = False
    why: str = ""
    refused: tuple[Refused, ...] = ()


def read_line(line: bytes | str) -> RequestLine:
    """Read one whole line.

    Raises ValueError, naming the field and never quoting the line, when it is no JSON object or
    has no id or no finish reason that we know. Any other value that cannot be is ``refused`` by
    name and the rest kept; contradictions are for ``refuse_impossible``.
    """
    told = _object(line)
    if told is None:
        raise ValueError("the line is no JSON object")
    asked, text = _asked(told.pop("request_parameters", None))
    text = text or any(told.get(name) for name in TEXT_FIELDS)
    ident = told.get("id")
    if not isinstance(ident, str) or not ident:
        raise ValueError("id: missing")
    reason = told.get("finish_reason")
    outcome, finish, status = outcome_of(reason)
    if _is_warming(asked, reason, told):
        return RequestLine(None, text, "warming_pass")
    reader = Numbers(told)
    record = RequestRecord(
        request_id=ident[:_MAX_NAME],
        source=Source.FILE,
        outcome=outcome,
        finish_reason=finish,
        status_code=status,
        engine="sglang",
        rank=reader.count("dp_rank"),
        model_name=asked.model_name,
        model_version=_version(told),
        request_type_hint=asked.request_type,
        tenant=asked.tenant,
        streaming=asked.streaming,
        prompt_tokens=reader.count("prompt_tokens"),
        output_tokens=reader.count("completion_tokens"),
        cached_tokens=_cached(reader),
        max_output_tokens=asked.max_output_tokens,
        preemptions=reader.count("num_retractions", "total_retractions"),
    )
    _times(record, reader)
    record.phase = _phase(record, reader)
    return RequestLine(record, text, refused=tuple(reader.refused))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The few things that are taken from what the client asked for."""

    streaming: bool | None = None
    max_output_tokens: int | None = None
    samples: int | None = None
    model_name: str = "unknown"
    request_type: str | None = None
    tenant: str = ""


def _asked(packed: object) -> tuple[_Asked, bool]:
    """(what is needed, whether what somebody wrote was in it).

    ``packed`` is a JSON text in every version that was read; an object is taken as well.
    """
    if packed is None:
        return _Asked(), False
    parameters = packed if isinstance(packed, dict) else None
    if isinstance(packed, str):
        parameters = _object(packed)
    if parameters is None:
        raise ValueError("request_parameters: no JSON object")
    text = any(parameters.get(name) for name in TEXT_PARAMETERS)
    sampling = parameters.get("sampling_params")
    sampling = sampling if isinstance(sampling, dict) else {}
    labels = parameters.get("custom_labels")
    labels = labels if isinstance(labels, dict) else {}
    streaming = parameters.get("stream")
    asked = _Asked(
        streaming=streaming if isinstance(streaming, bool) else None,
        max_output_tokens=whole(sampling.get("max_new_tokens")),
        samples=whole(sampling.get("n")),
        model_name=short_name(parameters.get("lora_path")) or "unknown",
        request_type=short_name(labels.get("request_type")) or None,
        tenant=short_name(labels.get("tenant")),
    )
    return asked, text


def _object(text: str | bytes) -> dict[str, Any] | None:
    """``None`` for anything else. A decoder's error holds the whole text: none leaves here."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _is_warming(asked: _Asked, reason: object, told: Mapping[str, Any]) -> bool:
    """The engine's own pass over a prompt before it samples it n times: it makes no token.

    At log level 0 ``n`` is not told; then any request for no token at all is taken for one.
    """
    if not isinstance(reason, Mapping) or reason.get("type") != "length":
        return False
    if told.get("completion_tokens") != 0 or reason.get("length") != 0:
        return False
    return asked.samples is None or asked.samples > 1


def _cached(reader: Numbers) -> int | None:
    """Prompt tokens found in the cache, of all tiers: device, host, storage."""
    told = reader.count("cached_tokens")
    if told is None and not reader.has("cached_tokens"):
        return reader.counts("cached_tokens_details", ("device", "host", "storage"))
    return told


def _times(record: RequestRecord, reader: Numbers) -> None:
    """Moments and durations, as the head of this module defines them."""
    received = reader.number("request_received_ts")
    e2e = reader.number("e2e_latency")
    finished = reader.number("request_finished_ts", "decode_finished_ts")
    if finished is None and received is not None and e2e is not None:
        finished = received + e2e
    record.received_unix_seconds, record.finished_unix_seconds = received, finished
    record.e2e_seconds = e2e
    prefilled = reader.number("prefill_finished_time", "prefill_finished_ts")
    started = reader.number("forward_entry_time")
    record.queue_seconds = _queue(record, reader, started)
    if not reader.has("completion_tokens"):
        return  # embeddings and scores: no token, so no first one
    record.prefill_seconds = _between(started, prefilled)
    record.time_to_first_token_seconds = _first(record, reader, prefilled)
    if received is not None and record.time_to_first_token_seconds is not None:
        record.first_token_unix_seconds = received + record.time_to_first_token_seconds
    _pace(record, reader, prefilled)


def _queue(record: RequestRecord, reader: Numbers, started: float | None) -> float | None:
    told = reader.number("queue_time")
    if told is None or not record.preemptions:
        return told
    bound = _between(reader.number("api_server_dispatch_finish_ts"), started)
    return None if bound is None else min(told, bound)


def _first(record: RequestRecord, reader: Numbers, prefilled: float | None) -> float | None:
    """TTFT, by the best of what this version tells."""
    received, e2e = record.received_unix_seconds, record.e2e_seconds
    seen = reader.number("first_token_latency")
    if record.streaming:
        # Handed over is after seen, and not after the end: anything else is a clock that was set.
        handed = _between(received, reader.number("response_sent_to_client_ts"))
        late = e2e is not None and handed is not None and handed > e2e + _SLACK_SECONDS
        if handed is not None and not late and (seen is None or handed >= seen - _SLACK_SECONDS):
            return handed if seen is None else max(handed, seen)
        return seen
    if record.streaming is None and seen is not None:
        return seen
    return _between(received, prefilled)


def _pace(record: RequestRecord, reader: Numbers, prefilled: float | None) -> None:
    """TPOT and decode; both only from the second token on."""
    tokens = record.output_tokens
    if tokens is None or tokens < 2:
        return
    if record.streaming is False:
        decode = _between(prefilled, record.finished_unix_seconds)
    else:
        rate = reader.number("decode_throughput")
        old = reader.has("decode_finished_ts")  # up to 0.5.9 the first token counted too
        decode = (tokens if old else tokens - 1) / rate if rate else None
    if decode is not None and math.isfinite(decode):
        record.decode_seconds = decode
        record.time_per_output_token_seconds = decode / (tokens - 1)


_SLACK_SECONDS = 0.005  # wall clocks of two processes, each set by its own last look


def _phase(record: RequestRecord, reader: Numbers) -> Phase:
    """Where it was when it ended."""
    if record.outcome in (Outcome.COMPLETED, Outcome.LENGTH) or record.output_tokens:
        return Phase.DECODE
    if reader.has("forward_entry_time"):
        return Phase.PREFILL
    # Times are told in full or not at all, so the missing one says something only beside others.
    return Phase.QUEUED if reader.has("queue_time") else Phase.UNKNOWN


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds from one moment to another; ``None`` where one is missing or they are the wrong way
    round by more than two processes' clocks can be."""
    if start is None or end is None or end < start - _SLACK_SECONDS:
        return None
    return max(0.0, end - start)


def _version(told: Mapping[str, Any]) -> str:
    version = told.get("weight_version")
    known = isinstance(version, str) and version not in ("", "default")
    return str(version)[:64] if known else "unknown"

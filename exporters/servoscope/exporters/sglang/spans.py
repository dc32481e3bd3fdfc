"""SGLang's trace spans (``--enable-trace``) as RequestRecords. Pure: spans and ``now`` in.

One request is a tree (0.5.23; seen with its spans on a real server):

    " Req <rid8>"                      root, by the tokenizer manager; usage and latencies on it
      "Tokenizer(host:.. | pid:..)"    thread: tokenize, api_server_dispatch
      "Scheduler [TP 0] ..."           thread: request_process, prefill_waiting, prefill_forward,
                                       decode_forward > decode_loop (one a token: not looked at)

The parts come from several processes in any order, a stage before its thread and a thread before
its root. Its parent may be a span of the client's, and one trace may hold many requests: a request
is known by its root, never by its trace.

- received: the root's start, as in the request file; TTFT: ``gen_ai.latency.time_to_first_token``,
  to the tokenizer manager's first sight of a token; e2e: ``gen_ai.latency.e2e``.
- queue: the span ``prefill_waiting`` of tensor rank 0 (waiting queue to first forward pass, waits
  after a retraction not in it). The attribute ``time_in_queue`` is defined and never set.
- prefill: the span ``prefill_forward``. decode: ``time_in_model_decode``; TPOT is it over the
  tokens after the first, from two tokens on.

What never becomes whole is told as ``unknown``, and no number is made up for it: a root whose end
has no reason and no scheduler's word, a scheduler thread whose root does not come. A root that
lacks only its queue and prefill spans is told without them.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from servoscope.exporters.otlp import AttributeValue, Span
from servoscope.exporters.plausibility import MAX_TOKENS
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.sglang.finish import outcome_of

__all__ = ["ATTRIBUTES", "SCOPE", "Assembler", "wanted"]

SCOPE = "sglang server"
_QUEUE, _PREFILL = "prefill_waiting", "prefill_forward"
_ROOT, _SCHEDULER = " Req ", "Scheduler"
_USAGE = "gen_ai.usage."
_LATENCY = "gen_ai.latency."
ATTRIBUTES = frozenset({
    "rid", "module", "tp_rank", "dp_rank", "type", "status_code", "message", "reason",
    "gen_ai.request.max_tokens", "gen_ai.request.n", "gen_ai.response.model",
    "gen_ai.response.finish_reasons",
    f"{_USAGE}prompt_tokens", f"{_USAGE}completion_tokens", f"{_USAGE}cached_tokens",
    f"{_LATENCY}time_to_first_token", f"{_LATENCY}e2e", f"{_LATENCY}time_in_model_decode",
})  # fmt: skip

_SETTLE_SECONDS = 5.0  # exporters of two processes send every half second
_LOST_ROOT_SECONDS = 60.0  # a thread ends within milliseconds of its root
_OPEN_SECONDS = 3_600.0  # stages whose thread never ended
_MAX_OPEN = 20_000
_MAX_TOLD = 50_000
_MAX_THREADS = 4  # of one request: one scheduler; two where it was handed over


def wanted(name: str) -> bool:
    """Whether a span of this name is looked at. The spans of single tokens are not."""
    return name in (_QUEUE, _PREFILL) or _ROOT in name or name.startswith(_SCHEDULER)


@dataclass(slots=True)
class _Stages:
    """What came for one scheduler thread."""

    since: float
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


@dataclass(slots=True)
class _Open:
    """What came for one root."""

    since: float  # the first part of it, by the caller's monotonic clock
    root: Span | None = None
    threads: list[Span] = field(default_factory=list)


class Assembler:
    """Collects spans and hands out requests. ``now`` is any clock that only goes on.

    ``drops`` counts, by reason: ``duplicate_span`` (a part of a request that was told already),
    ``open_table_full`` and ``never_ended`` (parts thrown away).
    """

    def __init__(
        self,
        *,
        max_open: int = _MAX_OPEN,
        settle_seconds: float = _SETTLE_SECONDS,
        lost_root_seconds: float = _LOST_ROOT_SECONDS,
        open_seconds: float = _OPEN_SECONDS,
    ) -> None:
        self._max_open = max_open
        self._settle_seconds = settle_seconds
        self._lost_root_seconds = lost_root_seconds
        self._open_seconds = open_seconds
        self._stages: OrderedDict[str, _Stages] = OrderedDict()  # by the thread's id
        self._open: OrderedDict[str, _Open] = OrderedDict()  # by the root's id
        self._roots: dict[str, str] = {}  # thread's id -> root's id, of those that are open
        self._told: OrderedDict[str, None] = OrderedDict()
        self.drops: Counter[str] = Counter()

    def __len__(self) -> int:
        """Requests and threads of which something came and that are not told."""
        return len(self._open) + len(self._stages)

    def take(self, spans: Iterable[Span], now: float) -> list[RequestRecord]:
        """Requests that these spans complete."""
        touched: dict[str, None] = {}
        for span in spans:
            root_id = self._take(span, now)
            if root_id:
                touched[root_id] = None
        whole = [i for i in touched if (entry := self._open.get(i)) and self._is_whole(entry)]
        return [record for i in whole if (record := self._tell(i)) is not None]

    def expire(self, now: float) -> list[RequestRecord]:
        """Requests of which nothing more is to be expected, with what is known of them."""
        ripe = []
        for ident, entry in self._open.items():
            age = now - entry.since
            if age < self._settle_seconds:
                break  # they are in the order in which they came
            if entry.root is not None or age >= self._lost_root_seconds:
                ripe.append(ident)
        found = [record for i in ripe if (record := self._tell(i)) is not None]
        while self._stages:
            ident, stages = next(iter(self._stages.items()))
            if now - stages.since < self._open_seconds:
                break
            del self._stages[ident]
            self.drops["never_ended"] += 1
        return found

    def _take(self, span: Span, now: float) -> str:
        """Note one span; returns the root's id where it belongs to one that is known."""
        if span.name in (_QUEUE, _PREFILL):
            self._take_stage(span, now)
            return self._roots.get(span.parent_id, "")
        is_root = _ROOT in span.name
        if not is_root and not _leads(span):
            self._stages.pop(span.span_id, None)  # another tensor rank tells the same
            return ""
        root_id = span.span_id if is_root else span.parent_id
        if not root_id:
            return ""
        if root_id in self._told:
            self.drops["duplicate_span"] += 1
            self._stages.pop(span.span_id, None)
            return ""
        entry = self._open.get(root_id)
        if entry is None:
            if len(self._open) >= self._max_open:
                self._close(next(iter(self._open)))
                self.drops["open_table_full"] += 1
            entry = self._open[root_id] = _Open(now)
        if is_root:
            entry.root = span
        elif len(entry.threads) < _MAX_THREADS and span.span_id not in self._roots:
            entry.threads.append(span)
            self._roots[span.span_id] = root_id
        return root_id

    def _close(self, root_id: str) -> _Open:
        entry = self._open.pop(root_id)
        for thread in entry.threads:
            del self._roots[thread.span_id]
        return entry

    def _take_stage(self, span: Span, now: float) -> None:
        if not span.parent_id:
            return
        stages = self._stages.get(span.parent_id)
        if stages is None:
            if len(self._stages) >= self._max_open:
                self._stages.popitem(last=False)
                self.drops["open_table_full"] += 1
            stages = self._stages[span.parent_id] = _Stages(now)
        if span.name == _QUEUE and stages.queue_seconds is None:
            stages.queue_seconds = span.seconds
        elif span.name == _PREFILL and stages.prefill_seconds is None:
            stages.prefill_seconds = span.seconds

    def _is_whole(self, entry: _Open) -> bool:
        if entry.root is None:
            return False
        found = [self._stages.get(thread.span_id) for thread in entry.threads]
        return any(
            s is not None and s.queue_seconds is not None and s.prefill_seconds is not None
            for s in found
        )

    def _tell(self, root_id: str) -> RequestRecord | None:
        entry = self._close(root_id)
        self._told[root_id] = None
        if len(self._told) > _MAX_TOLD:
            self._told.popitem(last=False)
        stages = _Stages(0.0)
        for thread in entry.threads:
            found = self._stages.pop(thread.span_id, None)
            if found is not None and stages.queue_seconds is None:
                stages = found
        if entry.root is None:
            return _lost(root_id, entry)
        return _record(entry.root, entry.threads, stages)


def _leads(span: Span) -> bool:
    """Whether this scheduler is the one of tensor rank 0, or the only one."""
    return span.attributes.get("tp_rank", 0) == 0


def _lost(root_id: str, entry: _Open) -> RequestRecord:
    """The scheduler was done with it, and what the front end knew of it never came."""
    return RequestRecord(
        request_id=root_id,
        source=Source.OTLP,
        outcome=Outcome.UNKNOWN,
        engine="sglang",
        rank=_rank(entry.threads),
        finish_reason="lost_root_span",
    )


def _record(root: Span, threads: list[Span], stages: _Stages) -> RequestRecord | None:
    told = root.attributes
    outcome, finish, status = _outcome(root, threads)
    tokens = _count(told.get(f"{_USAGE}completion_tokens"))
    samples = _count(told.get("gen_ai.request.n"))
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
        prompt_tokens=_count(told.get(f"{_USAGE}prompt_tokens")),
        output_tokens=tokens,
        cached_tokens=_count(told.get(f"{_USAGE}cached_tokens")),
        max_output_tokens=_count(told.get("gen_ai.request.max_tokens")),
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


def _phase(outcome: Outcome, tokens: int | None, stages: _Stages) -> Phase:
    if outcome in (Outcome.COMPLETED, Outcome.LENGTH) or tokens:
        return Phase.DECODE
    if stages.queue_seconds is not None:
        return Phase.PREFILL
    return Phase.UNKNOWN


def _rank(threads: list[Span]) -> int | None:
    return _count(threads[0].attributes.get("dp_rank")) if threads else None


def _count(value: AttributeValue | None) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_TOKENS else None


def _seconds(value: AttributeValue | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if value >= 0 else None

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

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from servoscope.exporters.otlp import Span
from servoscope.exporters.records import RequestRecord
from servoscope.exporters.sglang.span_record import (
    ATTRIBUTES,
    Stages,
    lost_record,
    request_record,
)

__all__ = ["ATTRIBUTES", "SCOPE", "Assembler", "wanted"]

SCOPE = "sglang server"
_QUEUE, _PREFILL = "prefill_waiting", "prefill_forward"
_ROOT, _SCHEDULER = " Req ", "Scheduler"
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
        self._stages: OrderedDict[str, Stages] = OrderedDict()  # by the thread's id
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
            stages = self._stages[span.parent_id] = Stages(now)
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
        stages = Stages(0.0)
        for thread in entry.threads:
            found = self._stages.pop(thread.span_id, None)
            if found is not None and stages.queue_seconds is None:
                stages = found
        if entry.root is None:
            return lost_record(root_id, entry.threads)
        return request_record(entry.root, entry.threads, stages)


def _leads(span: Span) -> bool:
    """Whether this scheduler is the one of tensor rank 0, or the only one."""
    return span.attributes.get("tp_rank", 0) == 0

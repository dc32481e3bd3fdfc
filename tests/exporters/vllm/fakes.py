"""Small stand-ins for the vLLM classes that the plug-in touches.

Only what the plug-in reads or wraps, with the control flow of vLLM 0.32.0
(v1/engine/output_processor.py, v1/metrics/stats.py, v1/core/sched/scheduler.py).
"""

from __future__ import annotations

import enum
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class OutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass
class RequestStateStats:
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class ParentRequest:
    request_id: str
    external_req_id: str
    child_requests: set[str] = field(default_factory=set)


@dataclass
class EngineCoreRequest:
    request_id: str
    external_req_id: str
    arrival_time: float
    prompt_len: int = 10
    max_tokens: int | None = 16
    output_kind: OutputKind = OutputKind.DELTA
    priority: int = 0
    lora_name: str | None = None


class RequestState:
    def __init__(self, request: EngineCoreRequest, parent: ParentRequest | None) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.parent_req = parent
        self.lora_name = request.lora_name
        self.output_kind = request.output_kind
        self.prompt_len = request.prompt_len
        self.max_tokens_param = request.max_tokens
        self.is_prefilling = True
        self.num_cached_tokens = 0
        self.detokenizer: Any = object()
        self.stats: RequestStateStats | None = RequestStateStats(arrival_time=request.arrival_time)


class IterationStats:
    def __init__(self, at: float | None = None) -> None:
        self.iteration_timestamp = time.time() if at is None else at

    def update_from_output(
        self,
        output: Any,
        engine_core_timestamp: float,
        is_prefilling: bool,
        req_stats: RequestStateStats,
        lora_states: Any,
        lora_name: str | None,
    ) -> None:
        if is_prefilling:
            req_stats.first_token_latency = self.iteration_timestamp - req_stats.arrival_time
        req_stats.num_generation_tokens += len(output.new_token_ids)
        if output.events is not None:
            req_stats.queued_ts, req_stats.scheduled_ts = output.events
        if is_prefilling:
            req_stats.first_token_ts = engine_core_timestamp
        req_stats.last_token_ts = engine_core_timestamp


class AsyncLLM:
    limit = 1 << 30

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        if n > self.limit:
            raise QueueOverflowError


class QueueOverflowError(Exception):
    pass


class OutputProcessor:
    def __init__(self) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: defaultdict[str, list[str]] = defaultdict(list)
        self.raised: list[Exception] = []

    def propagate_error(self, e: Exception) -> None:
        self.raised.append(e)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        aborted: list[str] = []
        for request_id in request_ids:
            ids = [request_id] if internal else self.external_req_ids.pop(request_id, [])
            for ident in ids:
                if self.request_states.pop(ident, None) is not None:
                    aborted.append(ident)
                elif parent := self.parent_requests.get(ident):
                    aborted.extend(self.abort_requests(list(parent.child_requests), internal=True))
                    self.parent_requests.pop(ident, None)
        return aborted

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None = None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        if request.request_id in self.request_states:
            return  # a streaming-input update
        self.request_states[request.request_id] = RequestState(request, parent_req)
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req
            parent_req.child_requests.add(request.request_id)
        self.external_req_ids[request.external_req_id].append(request.request_id)

    def process(
        self,
        request_id: str,
        tokens: int,
        at: float,
        stats: IterationStats,
        *,
        events: tuple[float, float] | None = None,
        finish: FinishReason | None = None,
        cached: int = 0,
    ) -> None:
        """One engine output of one request, as process_outputs handles it."""
        state = self.request_states.get(request_id)
        if state is None:
            return
        assert state.stats is not None
        output = SimpleNamespace(new_token_ids=[0] * tokens, events=events)
        stats.update_from_output(output, at, state.is_prefilling, state.stats, None, None)
        if state.is_prefilling:
            state.num_cached_tokens = cached
            state.is_prefilling = False
        if finish is not None:
            self.request_states.pop(request_id)
            if state.parent_req is not None:
                state.parent_req.child_requests.discard(request_id)
            self._update_stats_from_finished(state, finish, stats)

    def _update_stats_from_finished(
        self, req_state: RequestState, finish_reason: FinishReason, iteration_stats: Any
    ) -> None:
        pass


def fresh_classes() -> tuple[type, type, type]:
    """Own copies, so that hooks of one test are not those of another."""
    return (
        type("OutputProcessor", (), dict(OutputProcessor.__dict__)),
        type("IterationStats", (), dict(IterationStats.__dict__)),
        type("AsyncLLM", (), dict(AsyncLLM.__dict__)),
    )


@dataclass
class SchedulerRequest:
    request_id: str
    prompt: int
    output: int
    computed: int = 0

    @property
    def left(self) -> int:
        return self.prompt + self.output - self.computed


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    disable_chunked_mm_input: bool = False
    scheduler_cls: type | None = None

    def get_scheduler_cls(self) -> type:
        return Scheduler if self.scheduler_cls is None else self.scheduler_cls


class Scheduler:
    """Chunked prefill and decode in token counts only; the asserts are vLLM's."""

    num_spec_tokens = 0

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        self.max_num_active_reqs = self.max_num_running_reqs
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.waiting: deque[SchedulerRequest] = deque()
        self.running: list[SchedulerRequest] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.limits_at_add: list[int] = []

    def add_request(self, request: SchedulerRequest) -> None:
        self.limits_at_add.append(self.max_num_scheduled_tokens)
        self.waiting.append(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.arguments.append((*args, *kwargs.items()))
        budget = self.max_num_scheduled_tokens
        scheduled: dict[str, int] = {}
        for request in self.running:
            take = min(self._chunk(request), budget)
            if take:
                scheduled[request.request_id] = take
                budget -= take
        while budget and self.waiting and len(self.running) < self._slots():
            request = self.waiting.popleft()
            self.running.append(request)
            take = min(self._chunk(request), budget)
            scheduled[request.request_id] = take
            budget -= take
        total = sum(scheduled.values())
        assert total <= self.max_num_scheduled_tokens
        assert len(self.running) <= self.max_num_running_reqs
        for request in list(self.running):
            request.computed += scheduled.get(request.request_id, 0)
            if request.left <= 0:
                self.running.remove(request)
        return SimpleNamespace(total_num_scheduled_tokens=total, num_scheduled_tokens=scheduled)

    def _slots(self) -> int:
        return int(getattr(self, "max_num_active_reqs", self.max_num_running_reqs))

    def _chunk(self, request: SchedulerRequest) -> int:
        if request.computed >= request.prompt:
            return 1
        wanted = request.prompt - request.computed
        limit = self.scheduler_config.long_prefill_token_threshold
        return min(wanted, limit) if limit else wanted


class OldScheduler(Scheduler):
    """Before 0.32: one limit for admission and slots, and it is asserted."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        del self.max_num_active_reqs


def vllm_config(**scheduler: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SchedulerConfig(**scheduler),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0),
        model_config=SimpleNamespace(served_model_name="tiny", max_model_len=8192),
        cache_config=SimpleNamespace(block_size=16),
    )


class Clock:
    """A clock that tests move."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

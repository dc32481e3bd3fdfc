"""The one place that names attributes of SGLang's scheduler: facts at boot, values now, writing.

Written for 0.5.23. What an older or newer version lacks is listed by ``missing_parts``, before
anything is hooked. Where the engine's own ``set_internal_state`` knows a key, its own handler
writes it (0.5.23: running requests; an upstream change adds the chunk under the names below).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servoscope.exporters.sglang.knob_set import KnobEnvelope, KnobSet

__all__ = [
    "CONTROLLER",
    "RECEIVER",
    "SCHEDULER",
    "Parts",
    "Placement",
    "arrivals",
    "batch_tokens",
    "counts",
    "in_force",
    "missing_parts",
    "placement",
    "read_envelope",
    "unfit",
    "write",
]

SCHEDULER = "sglang.srt.managers.scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
RECEIVER = f"{_COMPONENTS}.request_receiver"
CONTROLLER = f"{_COMPONENTS}.internal_state"

_METHODS = (
    (SCHEDULER, "Scheduler", "get_next_batch_to_run"),
    (SCHEDULER, "Scheduler", "get_new_batch_prefill"),
    (RECEIVER, "SchedulerRequestReceiver", "_pull_raw_reqs"),
    (RECEIVER, "SchedulerRequestReceiver", "recv_requests"),
    (CONTROLLER, "SchedulerInternalStateController", "_update_handlers"),
    (CONTROLLER, "SchedulerInternalStateController", "set_internal_state"),
    (CONTROLLER, "SchedulerInternalStateController", "get_internal_state"),
)
_ATTRIBUTES = (
    "chunked_prefill_size", "prefill_decode_interval", "is_mixed_chunk", "page_size",
    "truncation_align_size", "prefill_delayer", "recv_skipper", "chunked_req", "waiting_queue",
    "running_batch", "last_batch", "internal_state", "disaggregation_mode",
)  # fmt: skip
#: The engine's own keys of set_internal_state, where it has them.
_OWN_KEYS: Mapping[str, str] = {
    "chunk_tokens": "chunked_prefill_size",
    "prefill_decode_interval": "prefill_decode_interval",
    "mixed_chunk": "enable_mixed_chunk",
    "max_running_requests": "pp_max_micro_batch_size",
}
_BATCHES = ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput")
_SINGLE = ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput")


@dataclass(frozen=True, slots=True)
class Parts:
    """What is needed of SGLang's modules, looked up once."""

    get_parallel: Any
    NextBatchPlan: Any
    SetInternalStateReq: Any


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank this process is."""

    dp_rank: int
    tp_rank: int
    tp_size: int

    @property
    def leads(self) -> bool:
        """Whether this rank receives the requests and broadcasts them to its group."""
        return self.tp_rank == 0


def missing_parts(modules: Mapping[str, Any]) -> list[str]:
    """What this version lacks. ``modules``: by name, None for one that is not there."""
    missing = []
    for module, owner, method in _METHODS:
        place = getattr(modules.get(module), owner, None)
        if not callable(getattr(place, method, None)):
            missing.append(f"{owner}.{method}")
    if not missing:
        prefill = modules[SCHEDULER].Scheduler.get_new_batch_prefill
        if list(inspect.signature(prefill).parameters)[:2] != ["self", "running_batch"]:
            missing.append("Scheduler.get_new_batch_prefill(running_batch)")
    return missing


def missing_attributes(scheduler: Any) -> list[str]:
    """What a scheduler that was just made lacks."""
    return [f"Scheduler.{name}" for name in _ATTRIBUTES if not hasattr(scheduler, name)]


def placement(parallel: Any) -> Placement:
    """Which rank this process is, of ``get_parallel()`` (or of an older version's scheduler)."""
    return Placement(
        dp_rank=int(getattr(parallel, "dp_rank", 0) or 0),
        tp_rank=int(getattr(parallel, "tp_rank", 0)),
        tp_size=int(getattr(parallel, "tp_size", 1)),
    )


def unfit(scheduler: Any, parallel: Any) -> str:
    """Why no knob may be turned on this engine, in words; empty when they may."""
    if missing := missing_attributes(scheduler):
        return f"this version lacks {', '.join(missing)}"
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    several = int(getattr(parallel, "nnodes", 1) or 1) > 1
    reasons = (
        (mode not in ("null", None), f"disaggregation ({mode}): the chunk is its transfers' grid"),
        (
            int(getattr(parallel, "pp_size", 1)) > 1,
            "pipeline parallel: stages choose their batches (and dynamic chunks) by themselves",
        ),
        (
            bool(getattr(parallel, "attn_dp_enabled", False)),
            "DP attention: the chunk is split over ranks, whose controls share one broadcast",
        ),
        (several, "several nodes: nothing shows that each of them has this plug-in"),
        (
            getattr(scheduler, "dllm_config", None) is not None,
            "a diffusion language model: it is not scheduled by chunks",
        ),
    )
    return next((why for applies, why in reasons if applies), "")


def read_envelope(scheduler: Any, parallel: Any) -> KnobEnvelope:
    """Boot values, bounds, and what this engine refuses."""
    align = int(scheduler.truncation_align_size or 1)
    page = max(1, int(scheduler.page_size))
    refused: dict[str, str] = {}
    if not scheduler.chunked_prefill_size:
        refused["chunk_tokens"] = "chunked prefill was off at boot: prompts are not cut"
    elif getattr(scheduler, "dynamic_chunk_sizer", None) is not None:
        refused["chunk_tokens"] = "--enable-dynamic-chunking: the engine chooses the chunk"
    if not scheduler.is_mixed_chunk:
        refused["mixed_chunk"] = (
            "off at boot, and only at boot does the engine check that it can mix;"
            " start it with --enable-mixed-chunk"
        )
    delayer = scheduler.prefill_delayer
    if delayer is not None:
        refused["batch_window_min_requests"] = (
            "the engine's own delayer waits for a share of the running requests"
            " (--prefill-delayer-queue-min-ratio)"
        )
        if not getattr(delayer, "_queue_trigger_enabled", False):
            refused["batch_window_seconds"] = (
                "the engine's own delayer waits by time only with --prefill-delayer-queue-min-ratio"
            )
    elif scheduler.recv_skipper is not None:
        why = "--scheduler-recv-interval: ranks do not hear of each other in every step"
        refused["batch_window_seconds"] = refused["batch_window_min_requests"] = why
    return KnobEnvelope(
        boot=in_force(scheduler, parallel, None),
        chunk_floor=max(page, align),
        chunk_multiple=page,
        refused=refused,
    )


def in_force(scheduler: Any, parallel: Any, ours: KnobSet | None) -> KnobSet:
    """The values that this rank's scheduler uses now; ``ours``: what we hold it to (window)."""
    delayer = scheduler.prefill_delayer
    seconds, at_least = 0.0, 0
    if delayer is not None:
        if getattr(delayer, "_queue_trigger_enabled", False):
            seconds = float(delayer._max_delay_ms) / 1e3
    elif ours is not None:
        seconds, at_least = ours.batch_window_seconds, ours.batch_window_min_requests
    return KnobSet(
        chunk_tokens=int(scheduler.chunked_prefill_size or 0),
        prefill_decode_interval=int(scheduler.prefill_decode_interval or 0),
        mixed_chunk=int(bool(scheduler.is_mixed_chunk)),
        max_running_requests=int(parallel.pp_max_micro_batch_size),
        batch_window_seconds=seconds,
        batch_window_min_requests=at_least,
    )


def write(scheduler: Any, parts: Parts, values: KnobSet, boot: KnobSet) -> None:
    """Make this rank's scheduler use ``values``. Every rank writes the same, all of it.

    Raises ValueError when one of the engine's own handlers refuses a value.
    """
    wanted = values.as_json()
    now = in_force(scheduler, parts.get_parallel(), values).as_json()
    own = scheduler.internal_state._update_handlers()
    keys = {
        key: wanted[name]
        for name, key in _OWN_KEYS.items()
        if key in own and wanted[name] != now[name]
    }
    if keys:
        request = parts.SetInternalStateReq(server_args=keys)
        if not scheduler.internal_state.set_internal_state(request).updated:
            raise ValueError(f"the engine refused {keys}")
    if "chunked_prefill_size" not in own and boot.chunk_tokens:
        scheduler.chunked_prefill_size = values.chunk_tokens
    if "prefill_decode_interval" not in own:
        scheduler.prefill_decode_interval = values.prefill_decode_interval
    left = getattr(scheduler, "_prefill_decode_interval_remaining", 0)
    if left > values.prefill_decode_interval:  # counted down from the old value
        scheduler._prefill_decode_interval_remaining = values.prefill_decode_interval
    if "enable_mixed_chunk" not in own:
        scheduler.is_mixed_chunk = bool(values.mixed_chunk)
    delayer = scheduler.prefill_delayer
    if delayer is not None and boot.batch_window_seconds:
        delayer._max_delay_ms = values.batch_window_seconds * 1e3


def counts(scheduler: Any) -> tuple[int, int]:
    """Requests (running, waiting) as the scheduler's lists say now."""
    return len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)


def arrivals(pulled: Sequence[Any]) -> int:
    """How many of these messages are requests for the waiting queue."""
    number = 0
    for message in pulled:
        kind = type(message).__name__
        if kind in _SINGLE:
            number += 1
        elif kind in _BATCHES:
            number += len(message.batch)
    return number


def batch_tokens(batch: Any) -> int:
    """Tokens that a batch computes: those of its prompts, or one for each decoding request."""
    if batch.forward_mode.is_extend():
        return int(batch.extend_num_tokens or 0)
    return 0 if batch.forward_mode.is_idle() else int(batch.batch_size())

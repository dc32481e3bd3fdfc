"""SGLang's scheduler processes as far as the plug-in sees them, with the names of 0.5.23.

``Group`` is what tensor parallelism does: the first rank pulls requests and broadcasts them as a
pickle, then every rank chooses a batch from its own copy.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from servoscope.exporters.sglang.scheduler_access import Parts
from servoscope.exporters.sglang.steering import Pilot

__all__ = [
    "BatchTokenizedGenerateReqInput",
    "Clock",
    "Controller",
    "ForwardMode",
    "Group",
    "NextBatchPlan",
    "Scheduler",
    "SetInternalStateReq",
    "TokenizedGenerateReqInput",
    "parallel_of",
    "parts_of",
]


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class TokenizedGenerateReqInput:
    """A request on its way to the scheduler."""


class BatchTokenizedGenerateReqInput:
    def __init__(self, count: int) -> None:
        self.batch = [TokenizedGenerateReqInput() for _ in range(count)]


class SetInternalStateReq:
    def __init__(self, server_args: dict[str, float]) -> None:
        self.server_args = server_args


class NextBatchPlan:
    def __init__(self, batch_to_run: Any, running_batch: Any) -> None:
        self.batch_to_run = batch_to_run
        self.running_batch = running_batch


class ForwardMode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed")

    def is_idle(self) -> bool:
        return self.name == "idle"


def parallel_of(tp_rank: int = 0, tp_size: int = 1, **more: Any) -> SimpleNamespace:
    """What ``get_parallel()`` answers."""
    plain = {
        "tp_rank": tp_rank, "tp_size": tp_size, "dp_rank": None, "pp_size": 1, "nnodes": 1,
        "attn_dp_enabled": False, "pp_max_micro_batch_size": 16,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **more})


class Controller:
    """SchedulerInternalStateController: ``own`` are the keys its handlers know."""

    def __init__(self, scheduler: Scheduler, parallel: Any, own: tuple[str, ...]) -> None:
        self.scheduler = scheduler
        self.parallel = parallel
        self.own = own
        self.asked: list[dict[str, float]] = []
        self.refuse = False

    def _update_handlers(self) -> dict[str, Any]:
        return dict.fromkeys(self.own)

    def set_internal_state(self, request: SetInternalStateReq) -> SimpleNamespace:
        self.asked.append(request.server_args)
        known = all(key in self.own for key in request.server_args)
        if self.refuse or not known:
            return SimpleNamespace(updated=False)
        for key, value in request.server_args.items():
            if key == "pp_max_micro_batch_size":
                self.parallel.pp_max_micro_batch_size = value
            else:
                setattr(self.scheduler, key, value)
        return SimpleNamespace(updated=True)


class Scheduler:
    """One rank. ``more`` sets attributes as boot flags would."""

    def __init__(
        self, parallel: Any, own: tuple[str, ...] = ("pp_max_micro_batch_size",), **more: Any
    ) -> None:
        self.chunked_prefill_size: int | None = 2048
        self.prefill_decode_interval = 0
        self._prefill_decode_interval_remaining = 0
        self.is_mixed_chunk = False
        self.page_size = 1
        self.truncation_align_size: int | None = None
        self.prefill_delayer: Any = None
        self.recv_skipper: Any = None
        self.chunked_req: Any = None
        self.dynamic_chunk_sizer: Any = None
        self.dllm_config: Any = None
        self.waiting_queue: list[int] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch: Any = None
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.internal_state = Controller(self, parallel, own)
        for name, value in more.items():
            setattr(self, name, value)


def parts_of(parallel: Any) -> Parts:
    return Parts(lambda: parallel, NextBatchPlan, SetInternalStateReq)


class Group:
    """The ranks of one replica, each with a clock of its own."""

    def __init__(self, size: int, **more: Any) -> None:
        self.parallels = [parallel_of(rank, size) for rank in range(size)]
        self.schedulers = [Scheduler(parallel, **more) for parallel in self.parallels]
        #: Ranks' clocks differ: whoever decides by his own parts from the others.
        self.clocks = [Clock(100.0 + 7.3 * rank) for rank in range(size)]
        self.pilots = [
            Pilot(scheduler, parts_of(parallel), clock=clock)
            for scheduler, parallel, clock in zip(
                self.schedulers, self.parallels, self.clocks, strict=True
            )
        ]

    @property
    def first(self) -> Pilot:
        return self.pilots[0]

    def pass_seconds(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.now += seconds

    def step(self, requests: int = 0) -> list[int]:
        """One pass of every rank's loop; how many requests each admitted."""
        pulled: list[Any] = [TokenizedGenerateReqInput() for _ in range(requests)]
        self.first.outgoing(pulled)
        wire = pickle.dumps(pulled)
        admitted = []
        for pilot, scheduler in zip(self.pilots, self.schedulers, strict=True):
            received = pilot.incoming(pickle.loads(wire))
            assert all(isinstance(r, TokenizedGenerateReqInput) for r in received)
            scheduler.waiting_queue += [1] * len(received)
            if pilot.holds_prefill():
                admitted.append(0)
            else:
                admitted.append(len(scheduler.waiting_queue))
                scheduler.waiting_queue.clear()
        return admitted

    def values(self) -> list[dict[str, float]]:
        """What each rank's scheduler uses."""
        return [pilot.values().as_json() for pilot in self.pilots]

"""Knobs inside SGLang's scheduler processes: one Pilot a rank, decisions on the first rank only.

The first rank of a group receives all requests and broadcasts them; all ranks then choose the same
batch from the same list. So a decision may depend on nothing else: what the first rank decides
(values, the end of a lease, a hold) is added to that list (``outgoing``) and acted on by every rank
in the same pass of the loop (``incoming``), before it chooses its batch. No rank looks at a clock
of its own, no further collective is made, and a decision that gets lost is lost on all.

``outgoing`` also puts boot values back when a lease has run out, whatever became of the thread
that serves the socket: the target carries its own deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from servoscope.exporters.knobs.law import Target
from servoscope.exporters.knobs.pilot import HELD_IDLE_SLEEP_SECONDS, KnobPilot
from servoscope.exporters.plugin import facts
from servoscope.exporters.sglang import scheduler_access as access
from servoscope.exporters.sglang.knob_set import KNOB_UNITS, KnobEnvelope, KnobSet
from servoscope.exporters.sglang.messages import KnobChange, KnobHold

__all__ = ["Pilot"]

log = logging.getLogger("servoscope.plugin")


class Pilot(KnobPilot[KnobSet]):
    """Steers one rank. What ``knobs.server`` asks runs in the socket's thread, the rest in the
    scheduler's.

    Once it is ``off`` the first rank sends the boot values, and no more.
    """

    units = KNOB_UNITS

    def __init__(
        self,
        scheduler: Any,
        parts: access.Parts,
        *,
        off: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parallel = parts.get_parallel()
        off = off or access.unfit(scheduler, parallel)
        nothing = KnobEnvelope(boot=KnobSet(0, 0, 0, 0))
        self._parts = parts
        self.place = access.placement(parallel)
        super().__init__(
            scheduler,
            nothing if off else access.read_envelope(scheduler, parallel),
            rank=self.place.dp_rank,
            off=off,
            clock=clock,
        )
        self._applied = self._sent = self.envelope.boot
        #: A target under which nothing is to be done.
        self._rest: Target[KnobSet] | None = self.law.target
        self._native_window = not off and scheduler.prefill_delayer is not None
        self._held = False

    def hello(self) -> dict[str, Any]:
        """Who this is, and the boot values of the knobs."""
        boot = {} if self.off else self.envelope.boot.as_json()
        return facts.hello(
            "sglang",
            boot_values={**boot, "tp_rank": self.place.tp_rank, "tp_size": self.place.tp_size},
            missing=[],
            rank=self.rank,
            off=self.off,
            model_names=[],
        )

    @property
    def rank_name(self) -> str:
        """First ranks, which take settings, are named by their replica alone."""
        return super().rank_name + ("" if self.place.leads else f"-tp{self.place.tp_rank}")

    def refuses(self) -> str:
        """Why nothing can be set through this rank; the further ranks of a group only answer."""
        further = "" if self.place.leads else "settings go to the first rank of the group"
        return super().refuses() or further

    def shown(self, _now: float) -> dict[str, float]:
        """Read from this rank's scheduler, so that a setting can be seen to have arrived."""
        return self.values().as_json()

    def values(self) -> KnobSet:
        """What this rank's scheduler uses now, read from it."""
        return access.in_force(self.scheduler, self._parts.get_parallel(), self._applied)

    def counts(self) -> tuple[int, int]:
        """Requests (running, waiting)."""
        return (0, 0) if self.off else access.counts(self.scheduler)

    def outgoing(self, pulled: list[Any]) -> None:
        """First rank: add what all ranks have to know to what it is about to broadcast."""
        if self.off:
            if not self.faults or self._sent == self.envelope.boot:
                return
        elif self.law.target is self._rest:
            return  # by far the most passes: nobody turned anything
        began = time.thread_time_ns()
        try:
            self._decide(pulled)
        except Exception as error:
            self.fault(error)
        self.counters.plugin_cpu_ns += time.thread_time_ns() - began

    def _decide(self, pulled: list[Any]) -> None:
        target = self.law.target
        values = self.envelope.boot if self.off else self.law.asked(self._clock())
        arrived = access.arrivals(pulled)
        if values != self._sent:
            pulled.append(KnobChange(values.as_json()))
            self._sent = values
        held = bool(not self.off and not self._native_window and self._holds(values, arrived))
        if held:
            pulled.append(KnobHold())
        if target.deadline is None and not held and values == self.envelope.boot:
            self._rest = target

    def _holds(self, values: KnobSet, arrived: int) -> bool:
        scheduler, now = self.scheduler, self._clock()
        running, waiting = access.counts(scheduler)
        for number in range(arrived):
            self._window.arrived(now, waiting + number, values)
        if not self._window.holds(now, waiting + arrived, values):
            return False
        if scheduler.chunked_req is not None:
            return False  # its next chunk must come
        if not running and scheduler.last_batch is None:
            time.sleep(HELD_IDLE_SLEEP_SECONDS)
        return True

    def incoming(self, received: list[Any]) -> list[Any]:
        """Every rank: take out what is ours and act on it."""
        self._held = False
        ours = [message for message in received if isinstance(message, (KnobChange, KnobHold))]
        if not ours:
            return received
        began = time.thread_time_ns()
        for message in ours:
            try:
                if isinstance(message, KnobHold):
                    self._held = True
                else:
                    self._take(KnobSet.from_json(message.values))
            except Exception as error:
                self.fault(error)
        rest = [message for message in received if not isinstance(message, (KnobChange, KnobHold))]
        self.counters.plugin_cpu_ns += time.thread_time_ns() - began
        return rest

    def _take(self, values: KnobSet) -> None:
        access.write(self.scheduler, self._parts, values, self.envelope.boot)
        self._applied = values
        log.info("servoscope: rank %d: %s", self.place.tp_rank, values.as_json())

    def holds_prefill(self) -> bool:
        """Whether no new prompt may be admitted in this pass."""
        return self._held

    def nothing(self, running_batch: Any) -> Any:
        """SGLang's answer for "no prefill in this pass"."""
        return self._parts.NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def chosen(self, batch: Any, cpu_ns: int) -> None:
        """A batch was chosen, in ``cpu_ns`` of the scheduler's CPU."""
        try:
            self.counters.stepped(access.batch_tokens(batch), cpu_ns, held=self._held)
        except Exception as error:
            self.fault(error)

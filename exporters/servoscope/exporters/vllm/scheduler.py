"""Knobs inside vLLM's scheduler: whatever scheduler class vLLM picked is subclassed.

Works by ``SchedulerConfig.get_scheduler_cls`` (vLLM 0.11.1 and later; early_releases.py does it for
those before), so Scheduler, AsyncScheduler and ``--scheduler-cls`` classes all pass here and
vLLM's own choice stays (naming a plain class with --scheduler-cls would switch asynchronous
scheduling off).

Changes apply at a step boundary, and in ``add_request`` too: an engine that idles makes no step,
and the first request must already see them. ``schedule`` may take any arguments
(throttle_prefills since 0.25).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from servoscope.exporters.knobs.bounds import Bound
from servoscope.exporters.knobs.law import Target
from servoscope.exporters.knobs.pilot import HELD_IDLE_SLEEP_SECONDS, KnobPilot
from servoscope.exporters.vllm import facts
from servoscope.exporters.vllm.knob_set import KNOB_UNITS, KnobEnvelope, KnobSet
from servoscope.exporters.vllm.scheduler_access import (
    missing_attributes,
    rank_of,
    read_envelope,
    slots_attribute,
    values_in_force,
)

__all__ = ["Pilot", "steered", "wrap_scheduler_config"]

log = logging.getLogger("servoscope.plugin")


class Pilot(KnobPilot[KnobSet]):
    """Steers one scheduler. ``step`` and ``before_add`` run in the engine's thread."""

    units = KNOB_UNITS
    bypasses = True
    envelope: KnobEnvelope

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.missing = missing_attributes(scheduler)
        nothing = KnobEnvelope(boot=KnobSet(0, 0, 0))
        super().__init__(
            scheduler,
            nothing if self.missing else read_envelope(scheduler),
            rank=rank_of(scheduler),
            off=f"unknown layout: {', '.join(self.missing)}" if self.missing else "",
            clock=clock,
        )
        self.slots = slots_attribute(scheduler)
        self._applied: tuple[KnobSet, int] = (self.envelope.boot, 0)
        #: A target under which nothing is to be done: boot values, in force, no window open.
        self._rest: Target[KnobSet] | None = self.law.target

    def hello(self) -> dict[str, Any]:
        """Who this is, and the boot values of the knobs."""
        return facts.hello(
            getattr(self.scheduler, "vllm_config", None),
            boot_values=self.envelope.boot.as_json(),
            missing=self.missing,
            rank=self.rank,
            off=self.off,
        )

    def bounds(self, running: int) -> dict[str, Bound]:
        """What the knobs may be now; all of them are refused while this is off."""
        bounds = self.envelope.bounds(running)
        return {name: replace(b, why=self.off or b.why) for name, b in bounds.items()}

    def in_force(self) -> dict[str, int]:
        """The scheduler's attributes as they are this moment (they follow at the next step)."""
        return {} if self.missing else values_in_force(self.scheduler)

    def passed(self) -> int:
        """Steps so far: a setting is answered once one has taken it over."""
        return self.counters.steps + self.counters.empty_steps

    def counts(self) -> tuple[int, int]:
        """Requests (running, waiting) as the scheduler's lists say now."""
        scheduler = self.scheduler
        if self.missing:
            return 0, 0
        return len(scheduler.running), len(scheduler.waiting) + self._elsewhere()

    def before_add(self) -> None:
        """A request is about to be added: settings made while the engine idled apply now."""
        if self.off or self.law.target is self._rest:
            return
        try:
            now = self._clock()
            values = self._target(now).values
            self._apply(values)
            self._window.arrived(now, len(self.scheduler.waiting) + self._elsewhere(), values)
        except Exception as error:
            self.fault(error)

    def step(
        self, schedule: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """One ``schedule()``, steered and measured. Only the engine's own errors get out."""
        if self.off:
            return schedule(*args, **kwargs)
        entered = time.thread_time_ns()
        held = self._before_step()
        if held is None:
            return schedule(*args, **kwargs)  # bypassed
        began = time.thread_time_ns()
        output = self._hold(schedule, args, kwargs) if held else schedule(*args, **kwargs)
        ended = time.thread_time_ns()
        try:
            tokens = int(output.total_num_scheduled_tokens)
            self.counters.stepped(tokens, ended - began, held=held)
            self.counters.plugin_cpu_ns += began - entered + time.thread_time_ns() - ended
        except Exception as error:
            self.fault(error)
        return output

    def _put_back(self) -> None:
        try:
            self._write(self.envelope.boot, len(self.scheduler.running))
        except Exception as last:
            log.warning("servoscope: boot values could not be restored: %r", last)

    def _before_step(self) -> bool | None:
        """Apply the target; True: hold admission in this step; None: bypassed."""
        try:
            if self.law.target is self._rest:
                return False  # by far the most steps: nobody turned anything
            return self._steer()
        except Exception as error:
            self.fault(error)
            return False

    def _steer(self) -> bool | None:
        now = self._clock()
        target = self._target(now)
        values = target.values
        if target.bypass:
            return None
        self._apply(values)
        if self._elsewhere():
            self._window.holds(now, 0, values)  # ends it: requests with KV blocks are not held
            held = False
        else:
            held = self._window.holds(now, len(self.scheduler.waiting), values)
        resting = target.deadline is None and not held and self._applied[0] is values
        self._rest = target if resting else None
        return held

    def _target(self, now: float) -> Target[KnobSet]:
        target = self.law.target
        return target if target.live(now) else Target(self.law.envelope.boot)

    def _elsewhere(self) -> int:
        """Waiting requests that hold KV blocks already (0.32 keeps them in a queue apart)."""
        return len(getattr(self.scheduler, "kv_holding_waiting", ()))

    def _apply(self, values: KnobSet) -> None:
        running = len(self.scheduler.running)
        if (values, running) == self._applied:
            return
        if values is self.envelope.boot and self._applied[0] is values:
            return  # never touched, or put back already: the attributes are vLLM's own
        self._write(values, running)
        self._applied = (values, running)

    def _write(self, values: KnobSet, running: int) -> None:
        scheduler, envelope = self.scheduler, self.envelope
        asserted = self.slots == "max_num_running_reqs"
        scheduler.max_num_scheduled_tokens = envelope.budget(values, running)
        config = scheduler.scheduler_config
        if config.long_prefill_token_threshold != values.long_prefill_threshold_tokens:
            config.long_prefill_token_threshold = values.long_prefill_threshold_tokens
        setattr(scheduler, self.slots, envelope.slots(values, running, asserted=asserted))

    def _hold(
        self, schedule: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A step that admits nobody: "no free slot", which every version knows."""
        scheduler = self.scheduler
        running = len(scheduler.running)
        if not running:
            time.sleep(HELD_IDLE_SLEEP_SECONDS)
        saved = getattr(scheduler, self.slots)
        paused = int(getattr(scheduler, "num_waiting_for_streaming_input", 0))
        setattr(scheduler, self.slots, running + paused)
        try:
            return schedule(*args, **kwargs)
        finally:
            setattr(scheduler, self.slots, saved)


def steered(base: type, serve: Callable[[Pilot], None]) -> type:
    """``base`` with a Pilot. ``serve`` opens the socket for it; its failure leaves vLLM alone."""
    if getattr(base, "servoscope_steered", False):
        return base

    class Steered(base):  # type: ignore[misc]  # any scheduler class vLLM picks
        servoscope_steered = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._servoscope_pilot: Pilot | None = None
            try:
                pilot = Pilot(self)
                serve(pilot)
                self._servoscope_pilot = pilot
                if pilot.off:
                    log.warning("servoscope: knobs are off: %s", pilot.off)
            except Exception as error:
                log.warning("servoscope: knobs are off: %r", error)

        def add_request(self, *args: Any, **kwargs: Any) -> Any:
            if (pilot := self._servoscope_pilot) is not None:
                pilot.before_add()
            return super().add_request(*args, **kwargs)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            pilot = self._servoscope_pilot
            if pilot is None or pilot.off:
                return super().schedule(*args, **kwargs)
            return pilot.step(super().schedule, args, kwargs)

    Steered.__name__ = Steered.__qualname__ = f"Steered{base.__name__}"
    Steered.__module__ = base.__module__
    return Steered


def wrap_scheduler_config(config_class: Any, serve: Callable[[Pilot], None]) -> str:
    """Make ``config_class.get_scheduler_cls`` answer a steered class. Returns why not, or ''."""
    original = getattr(config_class, "get_scheduler_cls", None)
    if original is None:
        return "SchedulerConfig.get_scheduler_cls is not there (vLLM before 0.11.1)"
    if getattr(original, "servoscope", False):
        return ""  # plug-ins are loaded in every process, sometimes twice

    def get_scheduler_cls(self: Any) -> type:
        picked: type = original(self)
        try:
            return steered(picked, serve)
        except Exception as error:
            log.warning("servoscope: knobs are off: %r", error)
            return picked

    get_scheduler_cls.servoscope = True  # type: ignore[attr-defined]
    config_class.get_scheduler_cls = get_scheduler_cls
    return ""

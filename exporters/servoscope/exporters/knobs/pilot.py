"""What steers one scheduler inside an engine: what is the same for every engine.

An engine's own Pilot applies what the law says to its scheduler, and reads it back; the socket
(server.KnobHandler) asks it by the names below.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic

from servoscope.exporters.knobs.bounds import Bound, Envelope, V
from servoscope.exporters.knobs.law import KnobLaw
from servoscope.exporters.knobs.step_counters import StepCounters
from servoscope.exporters.knobs.window import BatchWindow

__all__ = ["HELD_IDLE_SLEEP_SECONDS", "MAX_FAULTS", "KnobPilot"]

MAX_FAULTS = 20
HELD_IDLE_SLEEP_SECONDS = 0.001  # with nothing running a held engine would spin

log = logging.getLogger("servoscope.plugin")


class KnobPilot(ABC, Generic[V]):
    """Steers one scheduler. ``off`` says why it does not, and is empty while it does.

    Every fault of ours is caught and counted; after MAX_FAULTS it is off for good.
    """

    units: ClassVar[Mapping[str, str]]
    #: Whether the lease holder may have the scheduler run as if it were not steered, to measure it.
    bypasses: ClassVar[bool] = False

    def __init__(
        self,
        scheduler: Any,
        envelope: Envelope[V],
        *,
        rank: int,
        off: str,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.envelope = envelope
        self.rank = rank  # data parallel
        self.off = off
        self.faults = 0
        self.counters = StepCounters()
        self.law = KnobLaw(envelope)
        self._clock = clock
        self._window = BatchWindow()

    @abstractmethod
    def hello(self) -> dict[str, Any]:
        """The first line of the socket: who this is, and the boot values of the knobs."""

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Requests (running, waiting) as the scheduler's lists say now."""

    @property
    def rank_name(self) -> str:
        """Which rank this is, as the socket's name tells it."""
        return f"dp{self.rank}"

    def refuses(self) -> str:
        """Why nothing can be set through this rank; empty when it can."""
        return f"knobs are off: {self.off}" if self.off else ""

    def bounds(self, running: int) -> dict[str, Bound]:
        """What the knobs may be now; none that are not there."""
        return {} if self.off else self.envelope.bounds(running)

    def shown(self, now: float) -> Mapping[str, float]:
        """The value of every knob, as ``get`` tells it."""
        return self.law.asked(now).as_json()

    def in_force(self) -> dict[str, int]:
        """Attributes of the scheduler that follow a setting later, as they are this moment."""
        return {}

    def passed(self) -> int | None:
        """Steps so far, where a setting is answered once a step has taken it over."""
        return None

    def fault(self, error: Exception) -> None:
        """Count an error of ours; after MAX_FAULTS put the boot values back and stay off."""
        self.faults += 1
        if self.faults == 1:
            log.warning("servoscope: knobs: %r", error)
        if self.faults < MAX_FAULTS or self.off:
            return
        self.off = f"{self.faults} errors, the last {error!r}"
        log.warning("servoscope: knobs are off after %s", self.off)
        self._put_back()

    def _put_back(self) -> None:
        """Boot values at once, where that is not what ``off`` leads to anyway."""

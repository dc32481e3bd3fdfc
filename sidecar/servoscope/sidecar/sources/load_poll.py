"""What the questions for an engine's own load report have in common, whatever the engine."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from servoscope.sidecar.sources.scrape import Fetched, ScrapeState, fetch

if TYPE_CHECKING:
    import aiohttp

    from servoscope.exporters.records import EngineSample, SourceStatus
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.publish.engine_metrics import EngineMetrics

__all__ = ["LoadPoll", "PollOptions"]

_REST_SECONDS = 60.0  # between two questions for what is not there


class PollOptions(TypedDict):
    """How often and how long, and by which clocks (monotonic, wall)."""

    interval_seconds: float
    timeout_seconds: float
    steady: NotRequired[Callable[[], float]]
    clock: NotRequired[Callable[[], float]]


class LoadPoll(ABC):
    """Of one server. While it answers its gauges come from here, else from /metrics again."""

    max_bytes: int
    cost_ratio: float  # of the time that may pass in reading (ScrapeState)

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Callable[[], Target],
        metrics: EngineMetrics,
        **options: Unpack[PollOptions],
    ) -> None:
        self._session = session
        self._target = target
        self._metrics = metrics
        self._timeout_seconds = options["timeout_seconds"]
        self._steady = options.get("steady", time.monotonic)
        self._clock = options.get("clock", time.time)
        self._rests = False  # there is no such report now, and that will not change soon
        self._state = ScrapeState(
            interval_seconds=options["interval_seconds"],
            max_interval_seconds=max(_REST_SECONDS, options["interval_seconds"]),
            cost_ratio=self.cost_ratio,
        )
        self.refused: Counter[str] = Counter()

    @property
    def errors(self) -> Counter[str]:
        """Questions that gave nothing, by reason."""
        return self._state.errors

    async def run(self) -> None:
        """Ask until cancelled; what is not there is asked for once a minute."""
        while True:
            await self.once()
            await asyncio.sleep(_REST_SECONDS if self._rests else self._state.next_interval())

    @abstractmethod
    async def once(self) -> None:
        """One question."""

    @abstractmethod
    def status(self, now: float) -> SourceStatus:
        """As the other sources have it; ``off`` where there is no such report."""

    async def _fetch(self, target: Target, path: str) -> Fetched:
        return await fetch(
            self._session, f"{target.url}{path}",
            timeout_seconds=self._timeout_seconds, max_bytes=self.max_bytes,
        )  # fmt: skip

    def _publish(self, fetched: Fetched, sample: EngineSample, now: float, *, busy: bool) -> None:
        self._state.read(fetched, sample, busy=busy, now=now, at=self._clock())
        if sample.readings:
            self._metrics.observe_loads(sample)
        else:
            self._metrics.loads_gone()

    def _fail(self, fetched: Fetched, now: float) -> None:
        self._state.failed(fetched, now)
        self._metrics.loads_gone()

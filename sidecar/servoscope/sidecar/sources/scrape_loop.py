"""Reads the engine's /metrics again and again: fetch, parse, publish, and say how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from servoscope.exporters.engines import EngineParser, parser_for
from servoscope.sidecar.measure.labels import OTHER
from servoscope.sidecar.sources.scrape import Fetched, ScrapeState, fetch

if TYPE_CHECKING:
    import aiohttp

    from servoscope.exporters.records import EngineSample, SourceStatus
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.config import SidecarConfig
    from servoscope.sidecar.publish.engine_metrics import EngineMetrics

__all__ = ["ScrapeLoop"]

log = logging.getLogger(__name__)

_LARGE_BYTES = 256 * 1024
_MAX_REFUSED_NAMES = 100  # they come from the engine's text: an engine gone mad must not fill us


class ScrapeLoop:
    """``on_reset`` is called when the counters of an engine whose process is unseen started again;
    ``after`` after every try (other readings are taken in the same rhythm)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: SidecarConfig,
        target: Target,
        metrics: EngineMetrics,
        *,
        on_reset: Callable[[], None],
        after: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._config = config
        self._metrics = metrics
        self._on_reset = on_reset
        self._after = after
        self._clock = clock
        self._steady = steady
        self._wake = asyncio.Event()
        self.state = ScrapeState(
            interval_seconds=config.scrape_interval_seconds,
            max_interval_seconds=config.scrape_max_interval_seconds,
            cost_ratio=config.scrape_cost_ratio,
        )
        self.sample: EngineSample | None = None  # the last good one
        self.counted_until: float | None = None  # requests that ended by then are counted
        self.finished = 0.0  # requests that the engine counted since attach
        self.refused: Counter[str] = Counter()  # by name, the engine's or ours
        self.retarget(target)

    def retarget(self, target: Target) -> None:
        """Another life of the engine: maybe another version, certainly new counters."""
        self._target = target
        self._parser: EngineParser = parser_for(target.engine, target.version)
        self._wake.set()

    async def run(self) -> None:
        """Read until cancelled; sooner when woken."""
        while True:
            await self.once()
            await self._after()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.state.next_interval()):
                    await self._wake.wait()
            self._wake.clear()

    async def once(self) -> None:
        """One read."""
        epoch = self._target.identity
        fetched = await fetch(
            self._session,
            f"{self._target.url}/metrics",
            timeout_seconds=self._config.scrape_timeout_seconds,
            max_bytes=self._config.scrape_max_bytes,
        )
        if fetched.text is None:
            self.state.failed(fetched, self._steady())
            self._metrics.gone()
            return
        start = self._steady()
        if len(fetched.text) > _LARGE_BYTES:  # do not hold up records meanwhile
            sample = await asyncio.to_thread(self._parser.parse, fetched.text)
        else:
            sample = self._parser.parse(fetched.text)
        self._take(fetched.and_reading(self._steady() - start), sample, epoch)

    @property
    def counts_requests(self) -> bool:
        """Whether the engine counts finished requests at all."""
        sample = self.sample
        return sample is not None and sample.total("engine_requests_total") is not None

    @property
    def shows_work(self) -> bool:
        """Whether the last text told of requests that run or wait."""
        sample = self.sample
        if sample is None or self.state.up is False:
            return False
        return (sample.total("running") or 0) + (sample.total("waiting") or 0) > 0

    def status(self, now: float) -> SourceStatus:
        """As the sources of requests have it."""
        return self.state.status(now)

    def _take(self, fetched: Fetched, sample: EngineSample, epoch: object) -> None:
        progress = self._metrics.observe(sample, epoch)
        for name in (*(r.name for r in sample.refused), *progress.fell):
            known = name in self.refused or len(self.refused) < _MAX_REFUSED_NAMES
            self.refused[name if known else OTHER] += 1
        self.finished += progress.finished
        self.counted_until = at = self._clock()
        self.state.read(fetched, sample, busy=progress.busy, now=self._steady(), at=at)
        if sample.readings:
            self.sample = sample
        if progress.reset and epoch is None:
            self._on_reset()

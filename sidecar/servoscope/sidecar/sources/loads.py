"""Asks SGLang for its load (``/v1/loads``) more often than /metrics is read: control needs it.

While it answers, running, waiting and KV usage are published from here; when it does not, they come
from /metrics again, with that text's delays (``exporters.sglang.loads``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.exporters.sglang.loads import read_loads
from servoscope.sidecar.sources.scrape import Fetched, ScrapeState, fetch

if TYPE_CHECKING:
    import aiohttp

    from servoscope.exporters.sglang.settings import Settings
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.publish.engine_metrics import EngineMetrics

__all__ = ["LoadsPoll"]

_PATH = "/v1/loads?include=core"
_MAX_BYTES = 1024 * 1024
_MAX_INTERVAL_SECONDS = 60.0
_COST_RATIO = 0.05
_OLD_SECONDS = 5.0  # a snapshot of work in hand; the scheduler renews it every few steps
_DEFAULT_LOG_INTERVAL = 40
_NOT_THERE = ("http_404", "http_405")
BLIND_TO = (
    "what happens between two questions",
    "queues of one role (bootstrap, transfer) apart from the waiting ones",
)


class LoadsPoll:
    """Of one server. ``settings``: how the engine was started."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Callable[[], Target],
        metrics: EngineMetrics,
        *,
        interval_seconds: float,
        timeout_seconds: float,
        settings: Callable[[], Settings],
        steady: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._target = target
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._settings = settings
        self._steady = steady
        self._clock = clock
        self._absent = False  # this version has no such path
        self._state = ScrapeState(
            interval_seconds=interval_seconds,
            max_interval_seconds=max(_MAX_INTERVAL_SECONDS, interval_seconds),
            cost_ratio=_COST_RATIO,
        )
        self.refused: Counter[str] = Counter()

    @property
    def errors(self) -> Counter[str]:
        """Questions that gave nothing, by reason."""
        return self._state.errors

    async def run(self) -> None:
        """Ask until cancelled; a version without the path is asked once a minute."""
        while True:
            await self.once()
            rest = _MAX_INTERVAL_SECONDS if self._absent else self._state.next_interval()
            await asyncio.sleep(rest)

    async def once(self) -> None:
        """One question."""
        fetched = await fetch(
            self._session, f"{self._target().url}{_PATH}",
            timeout_seconds=self._timeout_seconds, max_bytes=_MAX_BYTES,
        )  # fmt: skip
        now = self._steady()
        self._absent = fetched.reason in _NOT_THERE
        if fetched.text is None:
            self._fail(fetched, now)
            return
        try:
            loads = read_loads(fetched.text)
            fetched = fetched.and_reading(self._steady() - now)
        except ValueError as error:
            self._fail(dataclasses.replace(fetched, reason="garbage", detail=str(error)), now)
            return
        for refused in loads.sample.refused:
            self.refused[refused.name if not refused.name.startswith("loads[") else "loads"] += 1
        if loads.age_seconds is not None and loads.age_seconds > _OLD_SECONDS:
            detail = (
                f"the engine's snapshot is {loads.age_seconds:.0f} s old with work in hand: "
                "its scheduler stands still"
            )
            self._fail(dataclasses.replace(fetched, reason="old_snapshot", detail=detail), now)
            return
        busy = (loads.sample.total("running") or 0) + (loads.sample.total("waiting") or 0) > 0
        self._state.read(fetched, loads.sample, busy=busy, now=now, at=self._clock())
        if loads.sample.readings:
            self._metrics.observe_loads(loads.sample)
        else:
            self._metrics.loads_gone()

    def status(self, now: float) -> SourceStatus:
        """As the other sources have it; ``off`` where this version has no load report."""
        status = self._state.status(now)
        state, detail = status.state, status.detail
        if self._absent:
            state, detail = SourceState.OFF, "this version has no /v1/loads (it came with 0.5.9)"
        if state in (SourceState.OFF, SourceState.FAILED, SourceState.STALE):
            every = self._settings().decode_log_interval or _DEFAULT_LOG_INTERVAL
            detail = (
                f"{detail}; running, waiting and KV usage come from /metrics: they move once in "
                f"{every} decode steps (--decode-log-interval) and stand still while it idles"
            )
        return dataclasses.replace(
            status, source=Source.LOADS, state=state, detail=detail, blind_to=BLIND_TO
        )

    def _fail(self, fetched: Fetched, now: float) -> None:
        self._state.failed(fetched, now)
        self._metrics.loads_gone()

"""Asks SGLang for its load (``/v1/loads``) more often than /metrics is read: control needs it.

While it answers, running, waiting and KV usage are published from here; when it does not, they come
from /metrics again, with that text's delays (``exporters.sglang.loads``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.exporters.sglang.loads import read_loads
from servoscope.sidecar.sources.load_poll import LoadPoll, PollOptions

if TYPE_CHECKING:
    import aiohttp

    from servoscope.exporters.sglang.settings import Settings
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.publish.engine_metrics import EngineMetrics

__all__ = ["LoadsPoll"]

_PATH = "/v1/loads?include=core"
_OLD_SECONDS = 5.0  # a snapshot of work in hand; the scheduler renews it every few steps
_DEFAULT_LOG_INTERVAL = 40
_NOT_THERE = ("http_404", "http_405")
BLIND_TO = (
    "what happens between two questions",
    "queues of one role (bootstrap, transfer) apart from the waiting ones",
)


class LoadsPoll(LoadPoll):
    """Of one server. ``settings``: how the engine was started."""

    max_bytes = 1024 * 1024
    cost_ratio = 0.05

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Callable[[], Target],
        metrics: EngineMetrics,
        *,
        settings: Callable[[], Settings],
        **options: Unpack[PollOptions],
    ) -> None:
        super().__init__(session, target, metrics, **options)
        self._settings = settings

    async def once(self) -> None:
        """One question."""
        fetched = await self._fetch(self._target(), _PATH)
        now = self._steady()
        self._rests = fetched.reason in _NOT_THERE
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
        self._publish(fetched, loads.sample, now, busy=busy)

    def status(self, now: float) -> SourceStatus:
        """As the other sources have it; ``off`` where this version has no load report."""
        status = self._state.status(now)
        state, detail = status.state, status.detail
        if self._rests:
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

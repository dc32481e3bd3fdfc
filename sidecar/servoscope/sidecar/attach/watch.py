"""Is the engine still the one we attached to? If not, attach again, by itself, for as long as it
takes, and count the restart once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from servoscope.sidecar.attach.processes import still_runs
from servoscope.sidecar.attach.target import AttachError, Target

__all__ = ["EngineWatch"]

log = logging.getLogger(__name__)

Attach = Callable[[], Awaitable[Target]]
Restarted = Callable[[Target], Awaitable[None]]


class EngineWatch:
    """``attach`` looks again; ``restarted`` is told of every new life of the engine."""

    def __init__(
        self,
        target: Target,
        attach: Attach,
        restarted: Restarted,
        *,
        interval_seconds: float = 2.0,
        runs: Callable[[Target], bool] | None = None,
    ) -> None:
        self.target = target
        self.restarts = 0
        self._attach = attach
        self._restarted = restarted
        self._interval_seconds = interval_seconds
        self._runs = runs or _runs
        self._reset_seen = False

    @property
    def alive(self) -> bool:
        """Whether the processes we attached to still run; true when they cannot be seen."""
        return self._runs(self.target)

    def reset_seen(self) -> None:
        """Counters of an engine whose processes cannot be seen started again at zero."""
        self._reset_seen = True

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._reset_seen or not self.alive:
                await self._again()

    async def _again(self) -> None:
        reset, self._reset_seen = self._reset_seen, False
        try:
            found = await self._attach()
        except AttachError as error:
            log.debug("not attached again yet: %s", error)
            self._reset_seen = reset
            return
        if found.identity is None and self.target.identity is not None and not reset:
            return  # it answers, its process is not visible yet: look again
        if found.identity == self.target.identity and found.identity is not None:
            return
        log.info("the engine at %s started again: attached to it", found.url)
        self.target = found
        self.restarts += 1
        await self._restarted(found)


def _runs(target: Target) -> bool:
    return still_runs(p for p in target.processes if p.role in ("api", "server"))

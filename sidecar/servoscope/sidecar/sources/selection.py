"""Which source of requests is in force: exactly one, the best that can be had.

Candidates come in order of preference (``candidates``); with none of them the engine's own
/metrics stands in (``in_force`` is ``None`` and ``decided`` is true). A record from any other
source than the one in force is not counted, so no request counts twice.

* A better source takes over at once. What it kept from before the moment it took over was counted
  by the one before and is left out; the scrape counted up to its last read (``scraped_until``).
  Sources hand over what they kept as soon as they run, so this is asked for a minute only, and the
  moment follows a step of the wall clock: new requests must not look old.
* A source that is lost gives way to a worse one after ``grace_seconds``: an engine that restarts
  comes back with its plug-in.
* A source that always runs (the relay carries traffic, the plug-in's sockets are looked for) keeps
  running while another is in force.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from servoscope.exporters.records import RequestRecord, Source
from servoscope.sidecar.sources.source import RequestSource, Sink
from servoscope.sidecar.wire.clock import StepWatch

__all__ = ["Candidate", "Remembered", "Selection"]

log = logging.getLogger(__name__)

_CUTOFF_SECONDS = 60.0


@dataclass(slots=True)
class Candidate:
    """A source that might be used. ``missing`` says in words why it cannot be, ``None`` if it can.

    ``settled`` is false until it is known whether the source can be had at all: worse ones wait.
    """

    source: RequestSource
    missing: Callable[[], str | None]
    always: bool = False
    settled: Callable[[], bool] = field(default=lambda: True)


class Remembered:
    """Asks a question again only after ``seconds``: it costs, and is asked at every turn."""

    def __init__(
        self,
        ask: Callable[[], str | None],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._asked_at: float | None = None
        self._answer: str | None = None

    def __call__(self) -> str | None:
        """The answer, at most ``seconds`` old."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= self._seconds:
            self._answer, self._asked_at = self._ask(), now
        return self._answer


class Selection:
    """Starts, stops and gates the candidates."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        sink: Sink,
        *,
        clock: Callable[[], float],
        steady: Callable[[], float] = time.monotonic,
        on_switch: Callable[[Source], None] | None = None,
        scraped_until: Callable[[], float | None] = lambda: None,
        grace_seconds: float = 5.0,
        check_seconds: float = 0.5,
    ) -> None:
        self._candidates = tuple(candidates)
        self._sink = sink
        self._clock = clock
        self._steady = steady
        self._on_switch = on_switch
        self._scraped_until = scraped_until
        self._grace_seconds = grace_seconds
        self._check_seconds = check_seconds
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._place: int | None = None  # of the candidate in force; None: the scrape
        self._lost_at: float | None = None  # by the steady clock
        self._cutoff: float | None = None
        self._cutoff_ends = 0.0  # by the steady clock
        self._clocks = StepWatch(clock(), steady())
        self.decided = False
        self.drops: Counter[tuple[str, ...]] = Counter()  # (source, reason)

    @property
    def in_force(self) -> RequestSource | None:
        """The source whose records count; ``None`` while it is the engine's own /metrics."""
        return None if self._place is None else self._candidates[self._place].source

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them, best first."""
        return self._candidates

    async def run(self) -> None:
        """Choose again and again until cancelled; then stop all sources."""
        try:
            while True:
                for place, candidate in enumerate(self._candidates):
                    if candidate.always:
                        self._start(place)  # also again, if it ended by a fault of ours
                self.choose()
                await asyncio.sleep(self._check_seconds)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def choose(self) -> None:
        """Put the best usable candidate in force."""
        best: int | None = None
        for place, candidate in enumerate(self._candidates):
            if candidate.missing() is None:
                best = place
                break
            if not candidate.settled() and not self.decided:
                return
        if self.decided and best == self._place:
            self._lost_at = None
            if best is not None:
                self._start(best)  # again, if it ended by a fault of ours
            return
        if self._is_worse(best):
            now = self._steady()
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now - self._lost_at < self._grace_seconds:
                return
        self._switch(best)

    def _is_worse(self, place: int | None) -> bool:
        if not self.decided or self._place is None:
            return False
        return place is None or place > self._place

    def _switch(self, place: int | None) -> None:
        before = self._place
        if self.decided and place is not None:
            self._cutoff = self._scraped_until() if before is None else self._clock()
            self._cutoff_ends = self._steady() + _CUTOFF_SECONDS
            self._clocks = StepWatch(self._clock(), self._steady())
        if before is not None and not self._candidates[before].always:
            self._stop(before)
        self._place, self._lost_at, self.decided = place, None, True
        name = Source.SCRAPE if place is None else self._candidates[place].source.source
        log.debug("requests are now seen by: %s", name)
        if self._on_switch is not None:
            self._on_switch(name)
        if place is not None:
            self._start(place)

    def _start(self, place: int) -> None:
        task = self._tasks.get(place)
        if task is None or task.done():
            coroutine = self._candidates[place].source.run(self._gate(place))
            self._tasks[place] = asyncio.create_task(self._guard(place, coroutine))

    async def _guard(self, place: int, running: object) -> None:
        """A source that raises is a fault of ours: say so; it is started again when chosen."""
        try:
            await running  # type: ignore[misc]  # the coroutine of RequestSource.run
        except Exception:
            log.exception("source %s ended", self._candidates[place].source.source)

    def _stop(self, place: int) -> None:
        task = self._tasks.pop(place, None)
        if task is not None:
            task.cancel()

    def _gate(self, place: int) -> Sink:
        def offer(record: RequestRecord) -> None:
            if self._place != place and not self._takes_over(place):
                return
            if not self._after_cutoff(record):
                self.drops[record.source.value, "before_switch"] += 1
                return
            self._sink(record)

        return offer

    def _takes_over(self, place: int) -> bool:
        """A record of a better source may come before the next round of ``choose``."""
        better = not self.decided or self._place is None or place < self._place
        if not better or self._candidates[place].missing() is not None:
            return False
        self._switch(place)
        return True

    def _after_cutoff(self, record: RequestRecord) -> bool:
        if self._cutoff is None:
            return True
        if self._steady() >= self._cutoff_ends:
            self._cutoff = None
            return True
        self._cutoff += self._clocks.look(self._clock(), self._steady())
        ended = record.finished_unix_seconds
        if ended is None and record.received_unix_seconds is not None:
            ended = record.received_unix_seconds + (record.e2e_seconds or 0.0)
        return ended is not None and ended >= self._cutoff

"""The relay: an opt-in pass-through in front of an engine that stamps what passes.

Where a tap is impossible (no right to capture, TLS ended in front of us, another host). Bytes go
through unchanged; `link` moves them, `watch` measures them, and a fault of measuring never stops
them. Loopback by default.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from servoscope.exporters.records import RequestRecord, Source, SourceState, SourceStatus
from servoscope.sidecar.relay.link import Link, Upstream
from servoscope.sidecar.relay.watch import Watch
from servoscope.sidecar.sources.source import OpenRequest, Sink
from servoscope.sidecar.wire.clock import StepWatch, read_clocks
from servoscope.sidecar.wire.exchange import Exchange
from servoscope.sidecar.wire.limits import DEFAULT_LIMITS, Budget, Limits

__all__ = ["RelaySource"]

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 60.0
_RETRY_SECONDS = 2.0
_CLOCK_SECONDS = 1.0
_KNOCK_SECONDS = 1.0
_STOP_TURNS = 100


class RelaySource:
    """Listens on ``listen_host:listen_port``, forwards to the upstream, reports its requests.

    ``listen_port`` 0 takes a free one; ``port`` says which, once ``listening`` is set. Beyond
    ``max_connections`` a client gets a 503 that says so. ``server`` labels the records (default:
    the upstream's address).
    """

    source = Source.RELAY

    def __init__(
        self,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        upstream_host: str = "127.0.0.1",
        upstream_port: int = 8000,
        *,
        server: str | None = None,
        max_connections: int = 1024,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if max_connections < 1:
            raise ValueError(f"max_connections: {max_connections} is below 1")
        self.upstream = Upstream(upstream_host, upstream_port)
        self.port: int | None = None
        self.listening = asyncio.Event()
        self._listen = (listen_host, listen_port)
        self._server = server or str(self.upstream)
        self._max_connections = max_connections
        self._limits = limits
        self._budget = Budget()
        self._drops: Counter[str] = Counter()
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sink: Sink | None = None
        self._numbers = itertools.count(1)
        wall, steady = read_clocks()
        self._clock = StepWatch(wall, steady)
        self._started = wall
        self._fault = "not started"
        self._upstream_fault: str | None = None
        self._last_record: float | None = None  # by the monotonic clock
        self._last_record_at: float | None = None  # by the wall clock

    # ---- RequestSource ---------------------------------------------------------------------------

    async def run(self, sink: Sink) -> None:
        """Listen until cancelled. A port in use is a fault in ``status``; we try again."""
        self._sink = sink
        try:
            while True:
                try:
                    await self._serve()
                except OSError as error:
                    host, port = self._listen
                    why = f"cannot listen on {host}:{port}: {error.strerror or error}"
                    if why != self._fault:
                        _log.warning("relay: %s", why)
                    self._fault = why
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._fault = "stopped"
            await self._stop()

    def status(self, now: float) -> SourceStatus:
        """Failed: not listening, or the upstream does not take connections."""
        if self._fault or self._upstream_fault:
            state, detail = SourceState.FAILED, self._fault or str(self._upstream_fault)
        elif self._last_record is None or now - self._last_record > _IDLE_SECONDS:
            state = SourceState.OK if self.open_requests() else SourceState.IDLE
            detail = f"relaying {self._listen[0]}:{self.port} to {self.upstream}"
        else:
            state, detail = SourceState.OK, f"relaying to {self.upstream}"
        return SourceStatus(
            source=self.source,
            state=state,
            detail=detail,
            last_success_unix_seconds=self._last_record_at,
            blind_to=(
                f"requests sent to {self.upstream} past the relay",
                "queue and prefill time, except where the engine reports them in its answers",
            ),
        )

    def open_requests(self) -> list[OpenRequest]:
        """Requests in flight through the relay."""
        return [open_ for link in self._links for open_ in link.watch.open_requests()]

    def drops(self) -> Mapping[str, int]:
        """What could not be measured, by reason."""
        return dict(self._drops)

    # ---- serving ---------------------------------------------------------------------------------

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._accepted, *self._listen)
        self.port = server.sockets[0].getsockname()[1]
        self._fault = ""
        self.listening.set()
        try:
            while True:
                await asyncio.sleep(_CLOCK_SECONDS)
                self._watch_clock()
                if self._upstream_fault is not None:
                    await self._knock()
        finally:
            self.listening.clear()
            server.close()

    async def _knock(self) -> None:
        """Does the upstream take connections again? Without traffic nobody else would find out."""
        to = self.upstream
        try:
            async with asyncio.timeout(_KNOCK_SECONDS):
                _, writer = await asyncio.open_connection(to.host, to.port)
        except OSError:  # TimeoutError is one
            return
        writer.close()
        self.upstream_answered(None)

    async def _stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links):
            # We break these off, not their clients: what is open ends as a server's failure.
            link.watch.server_closed(self.now(), reset=True)
            link.abort()
        for _ in range(_STOP_TURNS):  # the loop tells each transport in one of its next turns
            if not self._links:
                return
            await asyncio.sleep(0)

    def _accepted(self) -> asyncio.Protocol:
        exchange = Exchange(
            source=self.source,
            server=self._server,
            # Unique also over restarts of the sidecar: requests without an id are named by it.
            connection=f"relay-{int(self._started * 1000):x}-{next(self._numbers)}",
            limits=self._limits,
            budget=self._budget,
            drops=self._drops,
        )
        return Link(self, Watch(exchange, self._take, self._drops)).client_side()

    def _take(self, record: RequestRecord) -> None:
        self._last_record, self._last_record_at = time.monotonic(), self.now()
        if self._sink is not None:
            self._sink(record)

    def _watch_clock(self) -> None:
        step = self._clock.look(*read_clocks())
        if step:
            for link in self._links:
                link.watch.shift_clock(step)

    # ---- Owner of links --------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the epoch; steps of the wall clock only show once a second, as a shift."""
        return time.monotonic() + self._clock.offset

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` as a task that is kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def opened(self, link: Link) -> bool:
        """Take a new link in; False when it must be refused."""
        self._links.add(link)
        if len(self._links) <= self._max_connections:
            return True
        self._drops["connections_refused"] += 1
        if len(self._links) > 2 * self._max_connections:
            link.abort()  # even the polite refusals are bounded
        return False

    def closed(self, link: Link) -> None:
        """A link is gone."""
        self._links.discard(link)

    def upstream_answered(self, error: str | None) -> None:
        """Note whether the upstream takes connections."""
        self._upstream_fault = None if error is None else f"upstream {self.upstream}: {error}"

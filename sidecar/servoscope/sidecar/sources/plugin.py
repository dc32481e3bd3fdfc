"""Requests as our plug-in inside the engine tells them: the first choice of all sources.

Reads the stats sockets of all API-server processes of the engine, whichever there are now; finds
them again after a restart of the engine or of this sidecar. Records that were finished while no
sidecar read are kept by the plug-in and come first. When the engine's process dies, nobody is left
to tell the end of its open requests: they are counted here, once each, as errors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servoscope.exporters.plugin.hello import Hello, ProtocolError
from servoscope.exporters.records import (
    Outcome,
    Phase,
    RequestRecord,
    Source,
    SourceState,
    SourceStatus,
)
from servoscope.exporters.vllm.requests import StatsClient, find_stats_sockets
from servoscope.sidecar.sources.source import OpenRequest, Sink

__all__ = ["BLIND_TO", "INSTALL_HINT", "PluginSource", "blind_to"]

log = logging.getLogger(__name__)


def blind_to(received_by: str) -> tuple[str, ...]:
    """What it cannot see, by whose clock starts a request: the HTTP server's or the engine's."""
    on_http = received_by == "http"
    start = "the HTTP server has all of the request" if on_http else "the engine gets the request"
    return (
        "requests that the HTTP front end answers itself (4xx, overload before the engine)",
        *(() if on_http else ("headers: the x-request-type hint and the tenant",)),
        f"time on the wire and after a token left the engine: its clock starts when {start}",
        "requests that came within the last 0.1 s before the engine's process was killed",
    )


BLIND_TO = blind_to("http")  # as long as nothing was heard: every supported vLLM serves FastAPI
INSTALL_HINT = (
    "no plug-in in this engine: install this checkout into the engine's environment: "
    "pip install --no-deps PATH; then restart the engine"
)
_IDLE_SECONDS = 60.0
_POLL_SECONDS = 0.5
_RECENT = 20_000
_RETRY_SECONDS = 5.0
_LATELY_SECONDS = 2.0
_DEATH_SECONDS = 5.0
_DEATH_POLL_SECONDS = 0.25


class PluginSource:
    """``find`` lists (run directories, pids) of the engine as it is now; ``alive``: it runs."""

    source = Source.PLUGIN

    def __init__(
        self,
        find: Callable[[], tuple[Sequence[Path], Sequence[int]]],
        *,
        alive: Callable[[], bool],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        client: Callable[[Path], StatsClient] = StatsClient,
        poll_seconds: float = _POLL_SECONDS,
        on_connect: Callable[[], None] | None = None,
    ) -> None:
        self._find = find
        self._alive = alive
        self._clock = clock
        self._steady = steady
        self._client = client
        self._poll_seconds = poll_seconds
        self._on_connect = on_connect
        self._known: dict[Path, StatsClient] = {}  # one a socket: it knows what it handed over
        self._clients: dict[Path, StatsClient] = {}  # connected: hello was heard
        # Listed as open lately, and when. Its own list, so that a faulty last one costs nothing.
        self._open: dict[Path, dict[str, tuple[OpenRequest, float]]] = {}
        self._failures: dict[Path, str] = {}
        self._retry_at: dict[Path, float] = {}  # by the monotonic clock
        self._drops_before: Counter[str] = Counter()  # of sockets that are gone
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._last_record: float | None = None  # by the monotonic clock
        self._last_heard: float | None = None
        self.settled = False  # a first look has ended: there is a plug-in or there is none

    def missing(self) -> str | None:
        """Why it cannot be used now, ``None`` when it can."""
        if self._clients:
            return self._off_detail() or None
        for path, why in self._failures.items():
            return f"the plug-in's socket {path} cannot be read: {why}"
        return INSTALL_HINT

    async def run(self, sink: Sink) -> None:
        """Serve every socket that is there, and look again, until cancelled."""
        tasks: dict[Path, asyncio.Task[None]] = {}
        try:
            while True:
                found = find_stats_sockets(*self._find())
                for path in [p for p, task in tasks.items() if task.done()]:
                    tasks.pop(path).result()
                self._forget(set(self._known) - set(found) - tasks.keys())
                for path in found:
                    if path not in tasks and self._retry_at.get(path, 0.0) <= self._steady():
                        tasks[path] = asyncio.create_task(self._serve(path, sink))
                for path, client in self._clients.items():
                    self._note_open(path, client)
                if not found or self._clients or self._failures:
                    self.settled = True
                await asyncio.sleep(self._poll_seconds)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def status(self, now: float) -> SourceStatus:
        """Its state; ``off`` while the engine has no plug-in."""
        state, detail = SourceState.OFF, INSTALL_HINT
        if self._clients:
            quiet = self._last_record is None or now - self._last_record > _IDLE_SECONDS
            busy = any(True for _ in self.open_requests())
            state = SourceState.IDLE if quiet and not busy else SourceState.OK
            detail = self._off_detail()
            if detail:
                state = SourceState.FAILED
        elif self._failures:
            state, detail = SourceState.FAILED, self.missing() or ""
        return SourceStatus(
            source=self.source,
            state=state,
            detail=detail,
            last_success_unix_seconds=self._last_heard,
            blind_to=self._blind_to(),
        )

    def open_requests(self) -> Iterable[OpenRequest]:
        """What the plug-in listed last (1,000 an API server at most)."""
        for client in self._clients.values():
            for listed in client.in_flight:
                yield _open_request(listed)

    def drops(self) -> Mapping[str, int]:
        """Records that the plug-in dropped because nobody read them, or that made no sense."""
        drops = Counter(self._drops_before)
        for client in self._known.values():
            drops.update(_drops_of(client))
        return drops

    def _blind_to(self) -> tuple[str, ...]:
        """As the API server says that sees least."""
        if any(client.received_by != "http" for client in self._clients.values()):
            return blind_to("engine")
        return BLIND_TO

    def _off_detail(self) -> str:
        """The plug-in is loaded and cannot observe this version of the engine: in its words."""
        for client in self._clients.values():
            if client.hello is not None and client.hello.off:
                return f"the plug-in is off: {client.hello.off}"
        return ""

    async def _serve(self, path: Path, sink: Sink) -> None:
        client = self._known.setdefault(path, self._client(path))

        def heard(_hello: Hello) -> None:
            self._clients[path] = client
            self._failures.pop(path, None)
            self._last_heard = self._clock()
            if self._on_connect is not None:
                self._on_connect()

        def take(record: RequestRecord) -> None:
            self._last_record, self._last_heard = self._steady(), self._clock()
            self._remember(record.request_id)
            sink(record)

        try:
            await client.run(take, heard)
        except PermissionError as error:
            self._fail(
                path,
                f"{error.strerror or error}; run this sidecar as the engine's user, or start the "
                f"engine with SERVOSCOPE_SOCKET_GROUP set to a group of this user",
            )
        except (OSError, ProtocolError) as error:
            self._fail(path, str(error) or type(error).__name__)
        except Exception as error:
            # A fault of ours in reading one engine's lines: said, tried again, and no other
            # socket's problem.
            log.exception("reading %s failed", path)
            self._fail(path, f"a fault of ours: {type(error).__name__}")
        finally:
            self._note_open(path, client)  # also what came since the last look
            self._clients.pop(path, None)
        lately = self._open.pop(path, {})
        await self._bury([request for request, _ in lately.values()], sink)

    def _note_open(self, path: Path, client: StatsClient) -> None:
        now = self._steady()
        kept = {
            ident: noted
            for ident, noted in self._open.get(path, {}).items()
            if now - noted[1] < _LATELY_SECONDS
        }
        for listed in client.in_flight:
            request = _open_request(listed)
            kept[request.request_id] = (request, now)
        self._open[path] = kept

    def _fail(self, path: Path, why: str) -> None:
        self._failures[path] = why
        self._retry_at[path] = self._steady() + _RETRY_SECONDS

    def _forget(self, gone: Iterable[Path]) -> None:
        for path in gone:
            self._drops_before.update(_drops_of(self._known.pop(path)))
            self._failures.pop(path, None)
            self._retry_at.pop(path, None)

    async def _bury(self, open_then: Sequence[OpenRequest], sink: Sink) -> None:
        """The connection ended: if the engine died with requests open, they ended as errors.

        Those whose record came are remembered, so a request is in no list too many.
        """
        if not open_then:
            return
        died_at = self._clock()
        for _ in range(int(_DEATH_SECONDS / _DEATH_POLL_SECONDS)):
            if not self._alive():
                break
            await asyncio.sleep(_DEATH_POLL_SECONDS)
        else:
            return
        for request in open_then:
            if request.request_id not in self._recent:
                self._remember(request.request_id)
                sink(_died(request, died_at))

    def _remember(self, request_id: str) -> None:
        self._recent[request_id] = None
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)


def _drops_of(client: StatsClient) -> dict[str, int]:
    return {
        "plugin_buffer": client.dropped_total,
        "refused_record": client.refused_total,
        "garbage_line": client.garbage_total,
    }


def _open_request(listed: Mapping[str, Any]) -> OpenRequest:
    phase = listed.get("phase")
    return OpenRequest(
        request_id=str(listed.get("request_id")),
        phase=Phase(phase) if phase in set(Phase) else Phase.UNKNOWN,
        prompt_tokens=listed.get("prompt_tokens"),
        received_unix_seconds=listed.get("received_unix_seconds"),
        request_type_hint=listed.get("request_type_hint"),
        model_name=listed.get("model_name"),
    )


def _died(request: OpenRequest, at: float) -> RequestRecord:
    received = request.received_unix_seconds
    return RequestRecord(
        request_id=request.request_id,
        source=Source.PLUGIN,
        outcome=Outcome.ERROR,
        phase=request.phase,
        finish_reason="engine_gone",
        request_type_hint=request.request_type_hint,
        model_name=request.model_name or "unknown",
        received_unix_seconds=received,
        finished_unix_seconds=at,
        # A wall clock that was set back meanwhile leaves no duration to believe.
        e2e_seconds=None if received is None or at < received else at - received,
        prompt_tokens=request.prompt_tokens,
    )

"""A load client with its own truth: what it planned, what it saw, and nothing of the answer's text.

``run_closed`` keeps a fixed number of requests in flight; ``run_open`` sends each at its arrival
offset whatever the server does. Both are bounded in count, in requests in flight and in time, and
both refuse any target that is not on this host unless told otherwise.

Each request has a connection of its own unless ``keep_alive`` is asked for: llama.cpp announces
keep-alive with a streamed answer and closes 30 us after its end, so the next request on that
connection is lost through nobody's fault but the client's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from servoscope.exporters.records import Outcome
from servoscope.lab.request import CHAT, COMPLETIONS, Observed, PlannedRequest
from servoscope.lab.stream import AnswerReader, StreamError

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Limits",
    "Observed",
    "PlannedRequest",
    "RemoteTargetError",
    "check_target",
    "run_closed",
    "run_open",
]


class RemoteTargetError(ValueError):
    """Load was aimed at another host without ``allow_remote=True``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a run. A request cut by ``request_seconds`` or ``total_seconds`` is a timeout."""

    max_requests: int = 20_000
    max_in_flight: int = 512
    request_seconds: float = 120.0
    total_seconds: float = 900.0


OnObserved = Callable[[Observed], None]


async def run_closed(
    url: str,
    plan: Iterable[PlannedRequest],
    concurrency: int,
    *,
    limits: Limits | None = None,
    on_observed: OnObserved | None = None,
    stop: asyncio.Event | None = None,
    allow_remote: bool = False,
    keep_alive: bool = False,
) -> list[Observed]:
    """Send the plan with ``concurrency`` requests in flight; one Observed a request, in plan order.

    Raises RemoteTargetError for a target off this host, ValueError for a plan beyond the limits.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: {concurrency} is below 1")
    run = _Run(
        url, plan, limits or Limits(), on_observed, allow_remote=allow_remote, keep_alive=keep_alive
    )
    queue = iter(range(len(run.plan)))

    async def worker() -> None:
        for index in queue:
            await run.one(index)

    async with run.session():
        workers = min(concurrency, run.limits.max_in_flight, max(1, len(run.plan)))
        await run.bounded([worker() for _ in range(workers)], stop)
    return run.observed


async def run_open(
    url: str,
    plan: Iterable[PlannedRequest],
    *,
    limits: Limits | None = None,
    on_observed: OnObserved | None = None,
    stop: asyncio.Event | None = None,
    allow_remote: bool = False,
    keep_alive: bool = False,
) -> list[Observed]:
    """Send each request at its ``arrival_seconds``, answered or not; Observed in plan order.

    Beyond ``limits.max_in_flight`` an arrival is not sent (``sent`` False), never delayed: an open
    run that waits for the server would hide the server's queue. Raises as run_closed does.
    """
    run = _Run(
        url, plan, limits or Limits(), on_observed, allow_remote=allow_remote, keep_alive=keep_alive
    )
    begin = time.perf_counter()

    async def arrival(index: int) -> None:
        due = run.plan[index].arrival_seconds
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        if run.in_flight >= run.limits.max_in_flight:
            run.observed[index].detail = f"{run.in_flight} in flight: not sent"
            run.report(index)
            return
        run.observed[index].late_seconds = max(0.0, time.perf_counter() - begin - due)
        await run.one(index)

    async with run.session():
        await run.bounded([arrival(index) for index in range(len(run.plan))], stop)
    return run.observed


def check_target(url: str, *, allow_remote: bool = False) -> str:
    """The base URL without a trailing slash.

    Raises ValueError for what is no http(s) URL, RemoteTargetError for a host that is not this one.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: {url!r} is no http URL of a server")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise RemoteTargetError(
            f"url: {parts.hostname} is not this host, and load on a server that others use is an "
            "outage; pass allow_remote=True if it is yours to load"
        )
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: what it resolves to now is not what it resolves to later


class _Run:
    """One run: its plan, what was seen so far, and the connections."""

    def __init__(
        self,
        url: str,
        plan: Iterable[PlannedRequest],
        limits: Limits,
        on_observed: OnObserved | None,
        *,
        allow_remote: bool,
        keep_alive: bool,
    ) -> None:
        self.url = check_target(url, allow_remote=allow_remote)
        self.limits = limits
        self.plan: Sequence[PlannedRequest] = list(islice(plan, limits.max_requests + 1))
        if len(self.plan) > limits.max_requests:
            raise ValueError(f"plan: more than max_requests={limits.max_requests} requests")
        self.observed = [
            Observed(
                request_id=p.request_id,
                request_type=p.request_type,
                endpoint=p.endpoint,
                streaming=p.streaming,
            )
            for p in self.plan
        ]
        self.in_flight = 0
        self._on_observed = on_observed
        self._keep_alive = keep_alive
        self._out_of_time = False
        self._http: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        if self._keep_alive:
            # Idle connections go after 2 s, before any server's own limit (uvicorn: 5 s), so that
            # no request meets a connection the server is just closing.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            self._http = http
            yield

    async def bounded(self, work: Sequence[Any], stop: asyncio.Event | None) -> None:
        """Run all of ``work``, but no longer than the total time or the stop event allow."""
        everything = asyncio.gather(*work)
        waits: list[asyncio.Future[Any]] = [everything]
        if stop is not None:
            waits.append(asyncio.ensure_future(stop.wait()))
        try:
            done, _ = await asyncio.wait(
                waits, timeout=self.limits.total_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            self._out_of_time = not done
        finally:
            for wait in waits:
                if not wait.done():
                    wait.cancel()
            results = await asyncio.gather(*waits, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    def report(self, index: int) -> None:
        if self._on_observed is not None:
            self._on_observed(self.observed[index])

    async def one(self, index: int) -> None:
        """Send one request and note what came back; only cancellation leaves this as an error."""
        planned, seen, reader = self.plan[index], self.observed[index], AnswerReader()
        self.in_flight += 1
        seen.sent = True
        seen.started_unix_seconds = time.time()
        begin = time.perf_counter()
        cut = planned.abort_after_seconds
        aborting = cut is not None and cut < self.limits.request_seconds
        try:
            async with asyncio.timeout(cut if aborting else self.limits.request_seconds) as scope:
                await self._exchange(planned, seen, reader)
        except TimeoutError:
            ours = aborting and scope.expired()  # else the connect timed out, or the request did
            seen.outcome = Outcome.CLIENT_DISCONNECT if ours else Outcome.TIMEOUT
            seen.detail = f"closed by the client {cut:g} s after the send" if ours else "timeout"
        except (aiohttp.ClientError, StreamError, OSError) as error:
            seen.outcome = Outcome.ERROR
            seen.detail = f"{type(error).__name__}: {error}"[:200]
        except asyncio.CancelledError:
            seen.outcome = Outcome.TIMEOUT if self._out_of_time else Outcome.CANCELLED
            seen.detail = "end of the run"
            raise
        finally:
            self.in_flight -= 1
            seen.e2e_seconds = time.perf_counter() - begin
            _copy(reader, seen, begin)
            self.report(index)

    async def _exchange(
        self, planned: PlannedRequest, seen: Observed, reader: AnswerReader
    ) -> None:
        if self._http is None:
            raise RuntimeError("the run has no session")
        body = orjson.dumps(planned.body())
        async with self._http.post(
            self.url + planned.endpoint, data=body, headers=planned.all_headers()
        ) as response:
            seen.status = response.status
            if response.status != 200:
                seen.outcome = _refused(response.status)
                seen.detail = (await response.content.read(200)).decode("utf-8", "replace")
                response.close()
                return
            if not planned.streaming:
                reader.body(await response.read())
            else:
                async for chunk in response.content.iter_any():
                    reader.feed(chunk, time.perf_counter())
                    if reader.token_events >= (planned.abort_after_token_events or 1 << 62):
                        seen.outcome = Outcome.CLIENT_DISCONNECT
                        seen.detail = f"closed by the client at token event {reader.token_events}"
                        response.close()
                        return
            seen.outcome, seen.detail = _outcome(reader)


def _outcome(reader: AnswerReader) -> tuple[Outcome, str]:
    if reader.error is not None:
        return Outcome.ERROR, reader.error
    match reader.finish_reason:
        case None:
            return Outcome.ERROR, "truncated: the answer ended without a finish reason"
        case "length":
            return Outcome.LENGTH, ""
        case "abort":
            return Outcome.CANCELLED, "the engine says: abort"
        case "error":
            return Outcome.ERROR, "the engine says: error"
        case _:
            return Outcome.COMPLETED, ""


def _refused(status: int) -> Outcome:
    if status in (429, 503):
        return Outcome.REJECTED
    return Outcome.CLIENT_ERROR if 400 <= status < 500 else Outcome.ERROR


def _copy(reader: AnswerReader, seen: Observed, begin: float) -> None:
    """What the reader learned, into the observation."""
    seen.response_id = reader.response_id
    seen.token_events = reader.token_events
    seen.prompt_tokens = reader.prompt_tokens
    seen.cached_tokens = reader.cached_tokens
    seen.output_tokens = reader.output_tokens
    seen.finish_reason = reader.finish_reason
    seen.tpot_seconds = reader.tpot_seconds
    if reader.first_token_at is not None:
        seen.ttft_seconds = reader.first_token_at - begin
    if seen.status == 200:
        seen.text_sha256 = reader.text_sha256

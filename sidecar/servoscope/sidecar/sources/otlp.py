"""Requests from the trace spans that SGLang sends: a small OTLP receiver (HTTP, protobuf).

Takes only spans of SGLang's requests and answers the rest as received. gRPC, which is what SGLang
sends by default, is not spoken: its runtime alone is 18 MB; that it knocks is said. An exporter
sends a batch again when the answer is lost; a part of a request that was told already counts once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web

from servoscope.exporters.hosts import known_hosts
from servoscope.exporters.otlp import OtlpError, read_spans
from servoscope.exporters.records import RequestRecord, Source, SourceState, SourceStatus
from servoscope.exporters.sglang.settings import Settings
from servoscope.exporters.sglang.spans import ATTRIBUTES, SCOPE, Assembler, wanted
from servoscope.sidecar.api.guard import HostGuard
from servoscope.sidecar.sources.door import Door
from servoscope.sidecar.sources.source import OpenRequest, Sink

__all__ = ["BLIND_TO", "PATH", "OtlpSource", "start_hint"]

log = logging.getLogger(__name__)

PATH = "/v1/traces"
BLIND_TO = (
    "streaming or not, request types, tenants, endpoints: spans do not hold them",
    "requests whose client sends a traceparent that says not sampled (…-00)",
    "requests whose spans the engine drops when its exporter is behind: set SGLANG_TRACE_LEVEL=1",
    "requests that the HTTP front end answers itself (4xx), and HTTP status codes",
    "gaps between tokens, time on the wire and in the HTTP server",
)
_PROTOBUF = "application/x-protobuf"
_MAX_BODY_BYTES = 4 * 1024 * 1024
_IDLE_SECONDS = 60.0
_EXPIRE_SECONDS = 1.0
_RETRY_SECONDS = 5.0
_END_SECONDS = 1.0
_SPOKEN = {"grpc": "gRPC (HTTP/2)", "tls": "TLS"}
_COMPRESSIONS = frozenset({"gzip", "deflate"})


def start_hint(host: str, port: int) -> str:
    """How to start an engine so that its spans come here."""
    shown = f"[{host}]" if ":" in host else host
    return (
        f"start the engine with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf "
        f"SGLANG_TRACE_LEVEL=1 and --enable-trace --otlp-traces-endpoint "
        f"http://{shown}:{port}{PATH}"
    )


class OtlpSource:
    """Listens on ``host:port`` while it runs. ``settings``: of the engine as it is now.

    ``also`` gets every request besides, whether this source is in force or not.
    """

    source = Source.OTLP

    def __init__(
        self,
        host: str,
        port: int,
        *,
        settings: Callable[[], Settings] = Settings,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        assembler: Assembler | None = None,
        allowed_hosts: Iterable[str] = (),
        also: Sink | None = None,
    ) -> None:
        self._also = also
        self._host = host
        self._port = port
        self._settings = settings
        self._clock = clock
        self._steady = steady
        self._assembler = Assembler() if assembler is None else assembler
        self._guard = HostGuard(known_hosts(host, allowed_hosts, socket.gethostname()))
        self._drops: Counter[str] = Counter()
        self._fault = "not started"
        self._other = ""  # what the last one spoke that did not speak HTTP
        self._waiting: set[asyncio.Transport] = set()
        self._sink: Sink | None = None
        self._last_span: float | None = None  # by the monotonic clock
        self._last_record: float | None = None
        self._last_record_at: float | None = None
        self.port = port  # the one it listens on, once it does

    def missing(self) -> str | None:
        """Why it cannot be used now, ``None`` when it can."""
        if self._fault:
            return self._fault
        if self._settings().trace is False or self._last_span is None:
            other = f" (somebody tried in {_SPOKEN[self._other]})" if self._other else ""
            return f"no spans have come{other}; {start_hint(self._host, self.port)}"
        return None

    async def run(self, sink: Sink) -> None:
        """Serve until cancelled; a port that is taken is tried again."""
        self._sink = sink
        try:
            while True:
                runner = web.AppRunner(
                    self._app(), access_log=None, shutdown_timeout=_END_SECONDS,
                    auto_decompress=False,  # what cannot be is refused here, and counted
                )  # fmt: skip
                try:
                    await runner.setup()
                    listener = await asyncio.to_thread(self._listener)
                    served = await self._served(runner, listener)
                    try:
                        self.port = listener.getsockname()[1]
                        self._fault = ""
                        await self._expire_for_ever()
                    finally:
                        served.close()  # its connections are the runner's to close
                except OSError as error:
                    self._fault = (
                        f"otlp: cannot listen on {self._host}:{self._port}: "
                        f"{error.strerror or error}"
                    )
                    await asyncio.sleep(_RETRY_SECONDS)
                finally:
                    for transport in list(self._waiting):
                        transport.abort()
                    await runner.cleanup()
        finally:
            self._fault = "stopped"
            self._sink = None

    def status(self, now: float) -> SourceStatus:
        """Idle until the first span and when none has come lately."""
        state, detail = SourceState.OK, f"spans come to {self._host}:{self.port}{PATH}"
        if self._fault:
            state, detail = SourceState.FAILED, self._fault
        elif (missing := self.missing()) is not None:
            state, detail = SourceState.IDLE, missing
        elif self._last_record is None or now - self._last_record > _IDLE_SECONDS:
            state = SourceState.IDLE
        return SourceStatus(
            source=self.source,
            state=state,
            detail=detail,
            last_success_unix_seconds=self._last_record_at,
            blind_to=BLIND_TO,
        )

    def open_requests(self) -> Iterable[OpenRequest]:
        """None: which requests are open cannot be told from spans, they come when one has ended."""
        return ()

    def drops(self) -> Mapping[str, int]:
        """Bodies that were no spans, and parts of requests that were thrown away, by reason."""
        drops = self._drops + self._assembler.drops
        if self._guard.refused:
            drops["refused_host"] = self._guard.refused
        return drops

    def _listener(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        return socket.create_server((self._host, self._port), family=family)

    async def _served(self, runner: web.AppRunner, listener: socket.socket) -> asyncio.Server:
        inner = runner.server
        if inner is None:
            raise RuntimeError("the runner was not set up")
        return await asyncio.get_running_loop().create_server(
            lambda: Door(inner, self._not_http, self._waiting), sock=listener
        )

    def _not_http(self, kind: str) -> None:
        self._drops[f"{kind}_connection"] += 1
        if self._other != kind:  # again only after something else, or spans, came
            log.warning(
                "otlp: somebody connects to %s:%d in %s, which is not spoken here: %s",
                self._host, self.port, _SPOKEN[kind], start_hint(self._host, self.port),
            )  # fmt: skip
        self._other = kind

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard.middleware()]
        )
        app.router.add_post(PATH, self._receive)
        return app

    async def _receive(self, request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            self._drops["not_protobuf"] += 1
            raise web.HTTPUnsupportedMediaType(
                text=f"only {_PROTOBUF} is taken: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
            )
        try:
            body = _plain(await request.read(), request.headers.get("Content-Encoding", ""))
            spans = read_spans(body, scope=SCOPE, wanted=wanted, attributes=ATTRIBUTES)
        except web.HTTPRequestEntityTooLarge:
            self._drops["oversize_body"] += 1
            raise
        except _TooLongError:
            self._drops["oversize_body"] += 1
            raise web.HTTPRequestEntityTooLarge(_MAX_BODY_BYTES, _MAX_BODY_BYTES + 1) from None
        except OtlpError as error:
            self._drops["garbage_body"] += 1
            raise web.HTTPBadRequest(text=str(error)) from None
        if spans:
            self._other = ""
            self._last_span = now = self._steady()
            self._hand_over(self._assembler.take(spans, now))
        return web.Response(content_type=_PROTOBUF)  # an empty message: all was taken

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            self._hand_over(self._assembler.expire(self._steady()))

    def _hand_over(self, records: Iterable[RequestRecord]) -> None:
        for record in records:
            self._last_record = self._steady()
            self._last_record_at = record.finished_unix_seconds or self._clock()
            if self._also is not None:
                self._also(dataclasses.replace(record))  # the sink may change its own
            if self._sink is not None:
                self._sink(record)


class _TooLongError(Exception):
    """A body that is small, and more than is taken once it is unpacked."""


def _plain(body: bytes, coding: str) -> bytes:
    """The body unpacked, never more than may come. Raises OtlpError, _TooLongError."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in _COMPRESSIONS:
        raise OtlpError(f"Content-Encoding: {coding[:32]!r} is not read; gzip or none is")
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
    try:
        plain = unpacking.decompress(body, _MAX_BODY_BYTES + 1)
    except zlib.error:
        raise OtlpError(f"Content-Encoding: the body is no {coding}") from None
    if len(plain) > _MAX_BODY_BYTES:
        raise _TooLongError
    if not unpacking.eof or unpacking.unused_data:
        raise OtlpError(f"Content-Encoding: the body is not one whole {coding}")
    return plain

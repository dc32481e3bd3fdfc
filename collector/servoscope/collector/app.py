"""The collector as an ASGI application, and serving it: bind, open the store, run until stopped."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer

from servoscope.alerts.spec import Objective
from servoscope.collector.config import CollectorConfig
from servoscope.collector.guard import HostGuard
from servoscope.collector.ingest import IngestError
from servoscope.collector.routes import handle_errors, probes, questions, records
from servoscope.collector.service import Collector
from servoscope.collector.store import Store
from servoscope.exporters.hosts import known_hosts

__all__ = ["create_app", "run_collector"]

log = logging.getLogger(__name__)
GRACE_SECONDS = 10  # for answers under way when told to stop
MAX_CONNECTIONS = 512  # more are answered 503


def create_app(
    config: CollectorConfig,
    objectives: Sequence[Objective],
    clock: Callable[[], float] = time.time,
    *,
    store: Store | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The collector as an ASGI application; it opens the store now unless one is given.

    Raises StoreError (the database), OSError (the token file), ValueError (a setting).
    """
    config.validate()
    collector = Collector(config, objectives, clock, store, monotonic)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        keeper = asyncio.create_task(collector.intake.keep_within_bounds())
        try:
            yield
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
            await asyncio.to_thread(collector.close)

    app = FastAPI(
        title="Servoscope collector",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # that page loads its scripts from another host
        redoc_url=None,
    )
    app.state.collector = collector
    bearer = HTTPBearer(auto_error=False)

    async def authorised(request: Request) -> None:
        if not collector.token:
            return
        given = await bearer(request)
        sent = given.credentials.encode("utf-8", "replace") if given else b""
        if not hmac.compare_digest(sent, collector.token.encode()):
            raise IngestError(401, "authorization", "expected the collector's bearer token")

    app.add_middleware(
        HostGuard,
        allowed=known_hosts(config.listen, config.allowed_hosts, socket.gethostname()),
        on_refused=collector.telemetry.refused_hosts.inc,
    )
    handle_errors(app)
    app.include_router(probes(collector))
    app.include_router(records(collector), dependencies=[Depends(authorised)])
    app.include_router(questions(collector), dependencies=[Depends(authorised)])
    return app


class _Server(uvicorn.Server):
    """A uvicorn server that says when it listens, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn's raises the signal again at the end, and a clean end would be -15."""
        yield


@contextmanager
def _ended_by_signals(server: _Server) -> Iterator[None]:
    """SIGINT and SIGTERM end the server in order; once more, without waiting for its clients."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    held = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, ValueError, RuntimeError):  # not the main thread
            loop.add_signal_handler(number, end)
            held.append(number)
    try:
        yield
    finally:
        for number in held:
            loop.remove_signal_handler(number)


async def run_collector(
    config: CollectorConfig,
    objectives: Sequence[Objective],
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, or until cancelled; then store what was taken and return.

    ``on_ready`` is given the URL once it listens. Raises StoreError (the database cannot be used),
    OSError (the address cannot be had, the token file), ValueError naming the setting.
    """
    config.validate()
    listener = _bind(config.listen, config.port)
    try:
        url = _url(listener)
        app = create_app(config, objectives)
    except BaseException:
        listener.close()
        raise

    def ready() -> None:
        log.info("collector listens on %s", url)
        if on_ready is not None:
            on_ready(url)

    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        ),
        ready,
    )
    with _ended_by_signals(server):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            server.should_exit = True
            await serving
            raise
        finally:
            listener.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise OSError(f"listen: cannot have {host}:{port}: {error.strerror or error}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"

"""The sidecar's HTTP: /metrics, /healthz, /readyz, /api/v1/inspect and the control API.

Listens on loopback by default, on the first free port from the configured one, and writes
``sidecars/<server>.json`` to the runtime directory so that the command line finds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from servoscope.exporters.cpu import process_stat, same_process
from servoscope.exporters.paths import private_directory
from servoscope.sidecar.api.control_api import MAX_BODY_BYTES, ControlApi
from servoscope.sidecar.api.guard import HostGuard
from servoscope.sidecar.attach.target import AttachError
from servoscope.sidecar.publish.families import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE

__all__ = [
    "AlreadyAttachedError",
    "bind",
    "create_app",
    "process_metrics",
    "registered",
    "serving",
    "wants_openmetrics",
]

Render = Callable[[bool], str]  # openmetrics? -> our families


def process_metrics() -> CollectorRegistry:
    """This process's own CPU, memory, file and garbage-collector metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def wants_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics (with a weight above zero)."""
    for part in accept.split(","):
        kind, *parameters = [p.strip() for p in part.split(";")]
        if kind.lower() == "application/openmetrics-text":
            return not any(p.replace(" ", "") in ("q=0", "q=0.0") for p in parameters)
    return False


def create_app(
    render: Render,
    inspect: Callable[[], Awaitable[dict[str, Any]]],
    ready: Callable[[], str | None],
    control: ControlApi,
    guard: HostGuard,
) -> web.Application:
    """The application. ``ready`` says in words why it is not, ``None`` when it is."""
    own = process_metrics()

    async def metrics(request: web.Request) -> web.Response:
        openmetrics = wants_openmetrics(request.headers.get("Accept", ""))
        ours = render(openmetrics)
        theirs = (generate_openmetrics if openmetrics else generate_text)(own).decode()
        content_type = OPENMETRICS_CONTENT_TYPE if openmetrics else TEXT_CONTENT_TYPE
        answer = web.Response(body=(ours + theirs).encode(), headers={"Content-Type": content_type})
        answer.enable_compression()
        return answer

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        why = ready()
        return web.Response(text=f"{why or 'ready'}\n", status=503 if why else 200)

    async def inspected(_request: web.Request) -> web.Response:
        return web.json_response(await inspect())

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard.middleware()])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/api/v1/inspect", inspected)
    app.router.add_routes(control.routes())
    return app


def bind(host: str, port: int, attempts: int) -> socket.socket:
    """A listening socket on the first free port from ``port``; 0 takes any.

    Raises OSError when none of ``attempts`` ports is free, or when the right or the address is
    missing: another port would not help.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last: OSError | None = None
    for candidate in range(port, min(port + attempts, 65_536)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            last = error
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or error
                raise OSError(f"cannot listen on {host}, port {candidate}: {why}") from error
            continue
        listener.setblocking(False)
        return listener
    raise OSError(f"no free port from {port} on {host} ({attempts} tried): {last}")


@contextlib.asynccontextmanager
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve ``app`` on a listening socket for as long as the block lasts."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


class AlreadyAttachedError(AttachError):
    """Another sidecar of this server runs."""


def _living(path: Path) -> Mapping[str, Any] | None:
    """The entry at ``path`` if the process that wrote it is another one, alive, and ours."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        pid, url, start = int(entry["pid"]), str(entry["url"]), float(entry["start_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, half-written, or not of ours
    if pid == os.getpid() or not same_process(pid, start):
        return None  # ours, or left by a process that is gone
    return {"pid": pid, "url": url}


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time: two that start together must not both find the place free."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def registered(run_dir: Path, server: str, port: int, host: str, token: Path) -> Iterator[Path]:
    """Keep ``sidecars/<server>.json`` in ``run_dir`` for as long as the block lasts.

    Raises AlreadyAttachedError when a living sidecar of this server is registered there: two would
    take each other's records, and the command line could reach one of them only.
    """
    directory = private_directory(private_directory(run_dir) / "sidecars")
    path = directory / f"{server.replace('/', '_')}.json"
    shown = f"[{host}]" if ":" in host else host
    entry = {
        "pid": os.getpid(),
        "port": port,
        "url": f"http://{shown}:{port}",
        "server": server,
        "token_path": str(token),
        "start_seconds": process_stat(os.getpid()).start_seconds,
    }
    with _alone(directory):
        if (other := _living(path)) is not None:
            raise AlreadyAttachedError(
                f"{server} has a sidecar already: pid {other['pid']}, {other['url']}/metrics. "
                f"Stop it first (kill {other['pid']}), or use that one"
            )
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(entry) + "\n", encoding="utf-8")
        written.replace(path)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
                path.unlink()

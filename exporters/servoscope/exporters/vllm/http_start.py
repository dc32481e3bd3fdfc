"""When the HTTP server had a request in full, and what its headers say of it.

vLLM stamps a request's arrival when it begins to render the prompt: after the body was read, JSON
and pydantic parsed it and the chat template ran. A client's own time to first token is 7 to 20 ms
longer. So the ASGI application's ``__call__`` is wrapped (FastAPI's; Starlette's where FastAPI
has none of its own; both found in sys.modules, nothing is imported): of a POST it notes the wall
clock at the last message of the body, the path and two headers, and leaves them in a context
variable that the request's task and its child tasks see when they register with the engine.
Only ``__call__`` is touched: the middleware stack is as the application built it (tracers look at
its types), and putting ``__call__`` back undoes everything.

The body passes by unseen: of its messages only ``type`` and ``more_body`` are read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servoscope.exporters.vllm.hooks import Hooks

__all__ = ["HttpStart", "current_start", "watch_http"]

MAX_TEXT = 128
_APPLICATIONS = (("fastapi", "FastAPI"), ("starlette.applications", "Starlette"))
_HEADERS = {b"x-request-type": "hint", b"x-tenant": "tenant"}


class HttpStart:
    """One POST. ``received``: wall clock at the last byte of its body, None before that."""

    __slots__ = ("endpoint", "hint", "received", "spent", "tenant")

    def __init__(self) -> None:
        self.received: float | None = None
        self.endpoint: str | None = None  # URL path, without query
        self.hint: str | None = None  # x-request-type
        self.tenant: str | None = None  # x-tenant
        self.spent = False  # its engine requests have ended: what comes now is a later turn


_START: ContextVar[HttpStart | None] = ContextVar("servoscope_http_start", default=None)


def current_start() -> HttpStart | None:
    """The POST that the running task serves; None outside of one."""
    return _START.get()


def watch_http(
    hooks: Hooks,
    modules: Mapping[str, ModuleType] = sys.modules,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Wrap the ASGI applications of this process. False when there is none to wrap."""
    for module, name in _APPLICATIONS:
        owner = getattr(modules.get(module), name, None)
        if isinstance(owner, type) and hooks.wrap(
            owner, "__call__", lambda original: _watched(original, hooks, clock)
        ):
            return True
    return False


def _watched(original: Any, hooks: Hooks, clock: Callable[[], float]) -> Any:
    # A coroutine function, because servers tell ASGI 3 from ASGI 2 by that.
    async def asgi(self: Any, scope: Any, receive: Any, send: Any) -> None:
        start = None
        try:
            if scope["type"] == "http" and scope["method"] == "POST":
                start = None if hooks.off or hooks.bypass else _start_of(scope)
            # Servers let a connection's first context leak into its later tasks.
            if start is not None or _START.get() is not None:
                _START.set(start)
        except Exception as error:
            start = None
            hooks.fault(error)
        if start is None:
            await original(self, scope, receive, send)
            return
        try:
            await original(self, scope, _noting(receive, start, hooks, clock), send)
        finally:
            _START.set(None)  # not reset(): that raises where a task was closed from elsewhere

    return asgi


def _noting(
    receive: Callable[[], Awaitable[Any]],
    start: HttpStart,
    hooks: Hooks,
    clock: Callable[[], float],
) -> Callable[[], Awaitable[Any]]:
    async def noting() -> Any:
        message = await receive()
        if start.received is None:
            try:
                if message["type"] == "http.request" and not message.get("more_body", False):
                    start.received = clock()
            except Exception as error:
                hooks.fault(error)
        return message

    return noting


def _start_of(scope: Mapping[str, Any]) -> HttpStart:
    """Path and allow-listed headers of a request (the first of each name), bounded."""
    start = HttpStart()
    for name, value in scope["headers"]:
        if (kept := _HEADERS.get(name)) is not None and getattr(start, kept) is None:
            setattr(start, kept, _printable(value[:MAX_TEXT].decode("latin-1")))
    path = str(scope["path"])
    root = scope.get("root_path") or ""  # put in front by the server, not sent by the client
    if root and path.startswith(root):
        path = path[len(root) :]
    start.endpoint = _printable(path[:MAX_TEXT])
    return start


def _printable(text: str) -> str | None:
    """Without control characters; None when nothing is left."""
    text = text.strip()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text or None

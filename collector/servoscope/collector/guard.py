"""Refuses requests in the name of another host before anything else looks at them.

Without it a web page could make its own name resolve to this host and read our answers through
the browser of somebody who is allowed here (DNS rebinding; the rule is in ``exporters.hosts``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from servoscope.collector.answers import ErrorAnswer
from servoscope.exporters.hosts import host_allowed, host_refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["HostGuard"]

SETTING = "collector.allowed_hosts"
MISDIRECTED = 421


class HostGuard:
    """ASGI middleware: answers 421 in the form of every refusal unless the host is known."""

    def __init__(
        self, app: ASGIApp, *, allowed: Collection[str], on_refused: Callable[[], None]
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":  # the lifespan; there are no web sockets here
            await self._app(scope, receive, send)
            return
        hosts = Headers(scope=scope).getlist("host")
        host = hosts[0] if len(hosts) == 1 else None  # two: one of them could be believed by each
        if host_allowed(host, self._allowed):
            await self._app(scope, receive, send)
            return
        self._on_refused()
        told = ErrorAnswer(field="host", why=host_refused(host, SETTING))
        await JSONResponse(told.model_dump(), MISDIRECTED)(scope, receive, send)

"""Refuses requests in the name of another host before anything else looks at them.

Without it a web page could make its own name resolve to this host and read our answers through the
browser of somebody who is allowed here (DNS rebinding; the rule is in ``exporters.hosts``).
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from servoscope.exporters.hosts import host_allowed, host_refused

__all__ = ["HostGuard"]

SETTING = "sidecar.allowed_hosts"
MISDIRECTED = 421


class HostGuard:
    """Answers 421 ``{"error": ...}`` unless the host is known. ``allowed``: of ``known_hosts``."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self.refused = 0

    def middleware(self) -> Middleware:
        """For ``web.Application``."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return self._refusal(request) or await handler(request)

        return guarded

    def _refusal(self, request: web.Request) -> web.Response | None:
        hosts = request.headers.getall("Host", [])
        host = hosts[0] if len(hosts) == 1 else None  # two: one of them could be believed by each
        if host_allowed(host, self._allowed):
            return None
        self.refused += 1
        return web.json_response({"error": host_refused(host, SETTING)}, status=MISDIRECTED)

"""GET /api/v1/knobs, POST /api/v1/knobs, POST /api/v1/knobs/release.

Changes need the bearer token of the state directory. Bodies are small JSON objects:
``{"set": {"chunk_tokens": 256}, "actor": "who"}``; every error answers ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from servoscope.sidecar.control import token as tokens
from servoscope.sidecar.control.knobs import ControlError, KnobControl

__all__ = ["MAX_BODY_BYTES", "ControlApi"]

MAX_BODY_BYTES = 16 * 1024
_MAX_ACTOR = 64
_BODY_SECONDS = 5.0

Handler = Callable[[web.Request], Awaitable[web.Response]]


class ControlApi:
    """Routes over one KnobControl."""

    def __init__(self, control: KnobControl, token: str) -> None:
        self._control = control
        self._token = token

    def routes(self) -> list[web.RouteDef]:
        """The three routes."""
        return [
            web.get("/api/v1/knobs", self.read),
            web.post("/api/v1/knobs", self._guarded(self.change)),
            web.post("/api/v1/knobs/release", self._guarded(self.release)),
        ]

    async def read(self, _request: web.Request) -> web.Response:
        """The knobs, also when there are none (then ``why`` says so)."""
        knobs = [k.as_json() for k in await self._control.knobs()]
        body = {"knobs": knobs, "held": self._control.held, "why": self._control.why}
        return web.json_response(body)

    async def change(self, request: web.Request) -> web.Response:
        """Set knobs on all ranks or on none."""
        body = await _body(request)
        values = body.get("set")
        if not isinstance(values, dict):
            raise ControlError(400, "set: must be an object of knob names and numbers")
        applied = await self._control.set(values, _actor(body, request))
        knobs = [k.as_json() for k in await self._control.knobs()]
        return web.json_response({"applied": dict(applied), "knobs": knobs, "held": True})

    async def release(self, request: web.Request) -> web.Response:
        """Give the knobs back: boot values at once."""
        asked = await _body(request)
        await self._control.release(_actor(asked, request))
        knobs = [k.as_json() for k in await self._control.knobs()]
        body = {"knobs": knobs, "held": self._control.held, "why": self._control.why}
        return web.json_response(body)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.Response:
            if not tokens.matches(self._token, request.headers.get("Authorization")):
                error = "this needs the token: Authorization: Bearer <token>"
                return web.json_response({"error": error}, status=401)
            try:
                return await handler(request)
            except ControlError as error:
                return web.json_response({"error": str(error)}, status=error.status)

        return guarded


async def _body(request: web.Request) -> dict[str, Any]:
    raw = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.content.iter_any():  # one read() may be part of it
                raw += piece
                if len(raw) > MAX_BODY_BYTES:
                    raise ControlError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ControlError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    if not raw.strip():
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ControlError(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ControlError(400, "the body must be a JSON object")
    return found


def _actor(body: dict[str, Any], request: web.Request) -> str:
    named = body.get("actor")
    return named[:_MAX_ACTOR] if isinstance(named, str) and named else f"api {request.remote}"

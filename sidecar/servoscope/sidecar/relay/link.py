"""One client connection and its own upstream connection: bytes through, unchanged, both ways.

No pooling: a client's bytes never share an upstream connection with another client's. Reading from
one side stops while the other side's write buffer is full. A half-close is passed on as such; a
client that is gone takes its upstream connection with it at once, so that the engine stops
generating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from servoscope.sidecar.relay.watch import Watch

__all__ = ["Link", "Owner", "Upstream"]

#: An overloaded engine lets connections wait to be accepted; that is queueing, not an error.
CONNECT_SECONDS = 30.0
#: What a client may send ahead while the upstream connection is being made.
AHEAD_BYTES = 256 * 1024
#: How long a connection may outlive its other half: unsent bytes, or a client that does not close.
LINGER_SECONDS = 60.0
REFUSAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where bytes go."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Owner(Protocol):
    """What a link needs of the relay."""

    upstream: Upstream

    def now(self) -> float:
        """Wall-clock seconds that do not jump."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` as a task that is kept until it ends."""

    def opened(self, link: Link) -> bool:
        """A client connected; False when that is one too many."""

    def closed(self, link: Link) -> None:
        """Both connections of the link are gone."""

    def upstream_answered(self, error: str | None) -> None:
        """An upstream connection was made (None), or failed (why)."""


class Link:
    """The state of one pair of connections."""

    def __init__(self, owner: Owner, watch: Watch) -> None:
        self.watch = watch
        self._owner = owner
        self._client: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._ahead: list[bytes] = []
        self._asked = False  # the client has sent something
        self._client_ended = False
        self._upstream_ended = False
        self._connecting: asyncio.Task[None] | None = None
        self._refusal: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def client_side(self) -> asyncio.Protocol:
        """The protocol of the accepted connection."""
        return _ClientSide(self)

    def abort(self) -> None:
        """Break both connections."""
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.abort()

    # ---- making ----------------------------------------------------------------------------------

    def client_made(self, transport: asyncio.Transport) -> None:
        """A client connected: connect upstream; read it meanwhile, to notice when it leaves."""
        self._client = transport
        if not self._owner.opened(self):
            self._refuse(503, "too many connections", "the relay's connection limit is reached")
            return
        self._connecting = self._owner.start(self._connect())

    async def _connect(self) -> None:
        to = self._owner.upstream
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: _UpstreamSide(self), to.host, to.port)
        except OSError as error:  # TimeoutError is one
            why = "no answer in time" if isinstance(error, TimeoutError) else _reason(error)
            self._owner.upstream_answered(why)
            self._refuse(502, f"upstream {to}", why)
        finally:
            self._connecting = None

    def upstream_made(self, transport: asyncio.Transport) -> None:
        """The upstream connection is there: let the client's bytes in."""
        self._upstream = transport
        self._owner.upstream_answered(None)
        if self._client is None:
            transport.abort()
            return
        for data in self._ahead:
            transport.write(data)
        self._ahead.clear()
        if self._client_ended:
            _write_eof(transport)
        _resume(self._client)

    # ---- bytes -----------------------------------------------------------------------------------

    def client_data(self, data: bytes) -> None:
        """Bytes of the client, to the upstream first, then to the watch."""
        at = self._owner.now()
        self._asked = True
        if self._upstream is not None:
            self._upstream.write(data)
        elif self._connecting is not None:
            self._ahead.append(data)
            if sum(map(len, self._ahead)) > AHEAD_BYTES:
                _pause(self._client)
        self.watch.client_bytes(data, at)
        if self._refusal is not None:
            self._send_refusal(at)

    def upstream_data(self, data: bytes) -> None:
        """Bytes of the upstream, to the client first, then to the watch."""
        at = self._owner.now()
        if self._client is not None:
            self._client.write(data)
        self.watch.server_bytes(data, at)

    def client_writable(self, writable: bool) -> None:
        """The client's write buffer is full (or no longer): stop (or go on) reading upstream."""
        (_resume if writable else _pause)(self._upstream)

    def upstream_writable(self, writable: bool) -> None:
        """The upstream's write buffer is full (or no longer)."""
        (_resume if writable else _pause)(self._client)

    # ---- ends ------------------------------------------------------------------------------------

    def client_ended(self) -> None:
        """The client sent FIN: it may still read what comes."""
        self._client_ended = True
        self.watch.client_closed(self._owner.now(), reset=False)
        if self._upstream is None and self._connecting is not None:
            return  # passed on when there is an upstream
        if self._upstream is None or self._upstream_ended:
            self._close_both()
        else:
            _write_eof(self._upstream)

    def upstream_ended(self) -> None:
        """The upstream sent FIN: nothing more will come from it."""
        self._upstream_ended = True
        self.watch.server_closed(self._owner.now(), reset=False)
        if self._client is None or self._client_ended:
            self._close_both()
        else:
            _write_eof(self._client)
            self._abort_after(LINGER_SECONDS)

    def client_lost(self) -> None:
        """The client's connection is gone."""
        self._client = None
        self.watch.client_closed(self._owner.now(), reset=True)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        self._gone()

    def upstream_lost(self, error: Exception | None) -> None:
        """The upstream's connection is gone; the client still gets what is buffered for it."""
        self._upstream = None
        self.watch.server_closed(self._owner.now(), reset=error is not None)
        if self._client is not None:
            self._client.close()
            self._abort_after(LINGER_SECONDS)
        self._gone()

    def _close_both(self) -> None:
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.close()
        self._abort_after(LINGER_SECONDS)

    def _abort_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _gone(self) -> None:
        if self._client is None and self._upstream is None:
            if self._timer is not None:
                self._timer.cancel()
            self._owner.closed(self)

    # ---- refusing --------------------------------------------------------------------------------

    def _refuse(self, status: int, what: str, why: str) -> None:
        """Answer the client's first request with an error of ours, then close."""
        self._ahead.clear()
        if self._client is None:
            return
        reason = {502: "Bad Gateway", 503: "Service Unavailable"}[status]
        error = {"message": f"servoscope relay: {what}: {why}", "type": "relay", "code": status}
        body = orjson.dumps({"error": error})
        self._refusal = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode() + body
        _resume(self._client)
        self._abort_after(REFUSAL_SECONDS)
        if self._asked:
            self._send_refusal(self._owner.now())

    def _send_refusal(self, at: float) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None and self._client is not None:
            self._client.write(refusal)
            # Not close(): with request bytes unread, that would reset what the client reads.
            _write_eof(self._client)
            self.watch.server_bytes(refusal, at)
            self.watch.server_closed(at, reset=False)
            if self._client_ended:
                self._close_both()


class _ClientSide(asyncio.Protocol):
    """asyncio's callbacks of the client's connection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.client_made(_stream(transport))

    def data_received(self, data: bytes) -> None:
        self._link.client_data(data)

    def eof_received(self) -> bool:
        self._link.client_ended()
        return True  # keep our sending side

    def connection_lost(self, _exc: Exception | None) -> None:
        self._link.client_lost()

    def pause_writing(self) -> None:
        self._link.client_writable(False)

    def resume_writing(self) -> None:
        self._link.client_writable(True)


class _UpstreamSide(asyncio.Protocol):
    """asyncio's callbacks of the upstream's connection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.upstream_made(_stream(transport))

    def data_received(self, data: bytes) -> None:
        self._link.upstream_data(data)

    def eof_received(self) -> bool:
        self._link.upstream_ended()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.upstream_lost(exc)

    def pause_writing(self) -> None:
        self._link.upstream_writable(False)

    def resume_writing(self) -> None:
        self._link.upstream_writable(True)


def _stream(transport: asyncio.BaseTransport) -> asyncio.Transport:
    """uvloop's transports are asyncio's by behaviour, not by class."""
    stream: Any = transport
    return stream  # type: ignore[no-any-return]


def _pause(transport: asyncio.Transport | None) -> None:
    if transport is not None and not transport.is_closing():
        transport.pause_reading()


def _resume(transport: asyncio.Transport | None) -> None:
    if transport is not None and not transport.is_closing():
        transport.resume_reading()


def _write_eof(transport: asyncio.Transport) -> None:
    if not transport.is_closing() and transport.can_write_eof():
        transport.write_eof()


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__

"""The first bytes of a connection, looked at before an HTTP server gets them.

A client that speaks something else (gRPC, TLS) would be answered with an error that its operator
never sees, and fill the log of the server with bytes; here it is told apart by name and closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

__all__ = ["Door"]

#: How what is not plain HTTP begins: HTTP/2 without an upgrade (RFC 9113, 3.4), a TLS handshake.
_OTHERS = {b"PRI": "grpc", b"\x16\x03": "tls"}
_KNOWN_BY = max(map(len, _OTHERS))
_WAIT_SECONDS = 10.0


class Door(asyncio.Protocol):
    """One connection until its first bytes have come.

    ``inner`` makes what gets an HTTP connection; ``other`` is called with what it is otherwise;
    ``waiting`` holds those that have said nothing yet, to be closed at the end.
    """

    def __init__(
        self,
        inner: Callable[[], asyncio.Protocol],
        other: Callable[[str], None],
        waiting: set[asyncio.Transport],
    ) -> None:
        self._inner = inner
        self._other = other
        self._waiting = waiting
        self._begun = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for its first bytes, a while."""
        # Not asked for its class: uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._waiting.add(self._transport)
        self._timer = asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Tell what it is, and hand it over or close it."""
        transport = self._transport
        self._begun += data
        if transport is None or len(self._begun) < _KNOWN_BY:
            return
        self._forget()
        for beginning, kind in _OTHERS.items():
            if self._begun.startswith(beginning):
                self._other(kind)
                transport.abort()
                return
        inner = self._inner()
        transport.set_protocol(inner)
        inner.connection_made(transport)
        inner.data_received(self._begun)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """It left before it said what it is."""
        self._forget()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._waiting.discard(self._transport)

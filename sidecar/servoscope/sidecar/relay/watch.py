"""The measuring side of one relayed connection. Whatever goes wrong here, bytes still flow."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from servoscope.exporters.records import RequestRecord
from servoscope.sidecar.sources.source import OpenRequest, Sink
from servoscope.sidecar.wire.exchange import Exchange

__all__ = ["Watch"]

_log = logging.getLogger(__name__)


class Watch:
    """Feeds an Exchange; on any error of ours it stops looking at this connection, and counts."""

    def __init__(self, exchange: Exchange, sink: Sink, drops: Counter[str]) -> None:
        self._exchange: Exchange | None = exchange
        self._sink = sink
        self._drops = drops

    def client_bytes(self, data: bytes, at: float) -> None:
        """The client sent ``data``."""
        if (exchange := self._exchange) is not None:
            self._measure(lambda: exchange.client_bytes(data, at))

    def server_bytes(self, data: bytes, at: float) -> None:
        """The upstream sent ``data``."""
        if (exchange := self._exchange) is not None:
            self._measure(lambda: exchange.server_bytes(data, at))

    def client_closed(self, at: float, *, reset: bool) -> None:
        """The client closed its sending side, or (``reset``) is gone."""
        if (exchange := self._exchange) is not None:
            self._measure(lambda: exchange.client_closed(at, reset=reset))

    def server_closed(self, at: float, *, reset: bool) -> None:
        """The upstream closed its sending side, or (``reset``) broke off."""
        if (exchange := self._exchange) is not None:
            self._measure(lambda: exchange.server_closed(at, reset=reset))

    def shift_clock(self, seconds: float) -> None:
        """The wall clock was stepped."""
        if self._exchange is not None:
            self._exchange.shift_clock(seconds)

    def open_requests(self) -> list[OpenRequest]:
        """Requests in flight on this connection."""
        return self._exchange.open_requests() if self._exchange is not None else []

    def _measure(self, step: Callable[[], list[RequestRecord]]) -> None:
        try:
            for record in step():
                self._sink(record)
        except Exception as error:
            # Only the error's type: its text may quote what passed through.
            _log.error("relay: stopped measuring a connection: %s", type(error).__name__)
            self._drops["measuring_failed"] += 1
            self._exchange = None

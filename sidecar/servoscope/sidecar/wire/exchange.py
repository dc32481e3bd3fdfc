"""One TCP connection as HTTP/1.1 in both directions: bytes and their times in, records out.

Sans-I/O: tap and relay feed it, nothing here touches a socket or a clock, and nothing here raises
for what a peer sends. States of a connection:

* **following**: both directions are parsed; responses answer requests in order (pipelining).
* **lost**: bytes are missing (a gap), are no HTTP, or we came in the middle. Open requests ended
  as UNKNOWN. The next bytes that begin a request, with a response that begins a response, take us
  back to following: on a connection without pipelining nothing of an older request can then be
  left (RFC 9112 section 9.3).
* **opaque**: upgraded to another protocol, TLS, HTTP/2, closed, or lost too often. Never looked at
  again.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum

from servoscope.exporters.records import RequestRecord, Source
from servoscope.sidecar.sources.source import OpenRequest
from servoscope.sidecar.wire.call import Call, Head, Shared
from servoscope.sidecar.wire.limits import DEFAULT_LIMITS, Budget, Limits
from servoscope.sidecar.wire.outcome import End
from servoscope.sidecar.wire.parser import RequestParser, ResponseParser, UnreadableError
from servoscope.sidecar.wire.report import Origin

__all__ = ["Direction", "Exchange"]

_REQUEST_STARTS = (
    b"POST /", b"GET /", b"HEAD /", b"PUT /", b"DELETE /", b"OPTIONS ", b"PATCH /",
)  # fmt: skip
_RESPONSE_START = b"HTTP/1."
_TLS_HANDSHAKE = b"\x16\x03"
_HTTP2_PREFACE = b"PRI * HTTP/2"


class Direction(StrEnum):
    """Which side sent the bytes."""

    CLIENT = "client"
    SERVER = "server"


class _State(StrEnum):
    FOLLOWING = "following"
    LOST = "lost"
    OPAQUE = "opaque"


class Exchange:
    """One connection. Times are seconds since the epoch; every method returns finished records.

    ``connection`` must be unique for the life of the source: it names requests that have no id.
    ``synced=False``: we came in the middle of the connection. ``drops`` counts by reason what was
    given up; several exchanges may share it, as they may share ``budget``.
    """

    def __init__(
        self,
        *,
        source: Source,
        server: str,
        connection: str,
        limits: Limits = DEFAULT_LIMITS,
        budget: Budget | None = None,
        drops: Counter[str] | None = None,
        synced: bool = True,
    ) -> None:
        self._origin = Origin(source, server)
        self._connection = connection
        self._shared = Shared(limits, budget or Budget(), Counter() if drops is None else drops)
        self._calls: deque[Call] = deque()
        self._records: list[RequestRecord] = []
        self._count = 0
        self._resyncs = 0
        self._client_closed_at: float | None = None
        self._state = _State.FOLLOWING
        self._awaiting_response_start = False
        self._head_seen = False
        self._requests = RequestParser(self)
        self._responses = ResponseParser(self)
        if not synced:
            self._state = _State.LOST
            self._awaiting_response_start = True

    @property
    def drops(self) -> Counter[str]:
        """What was given up, by reason."""
        return self._shared.drops

    # ---- bytes -----------------------------------------------------------------------------------

    def client_bytes(self, data: bytes, at: float) -> list[RequestRecord]:
        """The client sent ``data``, seen at ``at``."""
        if not data or self._state is _State.OPAQUE:
            return []
        if not self._count and data.startswith((_TLS_HANDSHAKE, _HTTP2_PREFACE)):
            self._shared.drops["tls" if data.startswith(_TLS_HANDSHAKE) else "http2"] += 1
            self._state = _State.OPAQUE
            return []
        if self._client_closed_at is not None:  # out of order: it had not closed by then
            self._client_closed_at = max(self._client_closed_at, at)
        if self._state is _State.LOST and not self._found_again(data):
            return []
        try:
            self._requests.feed(data, at)
        except UnreadableError as error:
            self._lose(at, error.reason)
        return self._taken()

    def server_bytes(self, data: bytes, at: float) -> list[RequestRecord]:
        """The server sent ``data``, seen at ``at``."""
        if self._state is not _State.FOLLOWING or not data:
            return []
        if self._awaiting_response_start:
            if not data.startswith(_RESPONSE_START):
                return []
            self._awaiting_response_start = False
        try:
            self._responses.feed(data, at)
        except UnreadableError as error:
            self._lose(at, error.reason)
        return self._taken() if self._records else []

    def client_closed(self, at: float, *, reset: bool = False) -> list[RequestRecord]:
        """The client sent FIN (it may still read), or with ``reset`` is gone altogether."""
        if self._state is _State.OPAQUE:
            return []
        if self._client_closed_at is None:
            self._client_closed_at = at
        for call in list(self._calls):
            if reset or not call.sent:
                self._calls.remove(call)
                self._end(call, End.CLIENT_CLOSED, self._client_closed_at)
        if reset:
            self._state = _State.OPAQUE
        return self._taken()

    def server_closed(self, at: float, *, reset: bool = False) -> list[RequestRecord]:
        """The server sent FIN or, with ``reset``, RST: no more of any response can come."""
        if self._state is _State.OPAQUE:
            return []
        while self._calls:
            call = self._calls.popleft()
            if call.until_close and call.status is not None and not reset:
                self._end(call, End.COMPLETE, at)
            elif self._client_closed_at is not None:
                self._end(call, End.CLIENT_CLOSED, self._client_closed_at)
            else:
                self._end(call, End.SERVER_CLOSED, at)
        self._state = _State.OPAQUE
        return self._taken()

    def gap(self, direction: Direction, at: float) -> list[RequestRecord]:
        """Bytes of ``direction`` are missing for good."""
        if self._state is _State.FOLLOWING:
            self._lose(at, f"gap_{direction}")
        return self._taken()

    def abandoned(self, at: float) -> list[RequestRecord]:
        """We stop watching this connection: what is open ends as unknown."""
        self._stop(at)
        return self._taken()

    # ---- what is open ----------------------------------------------------------------------------

    def open_requests(self) -> list[OpenRequest]:
        """Inference requests that were received whole and have not ended."""
        return [c.open_request() for c in self._calls if c.endpoint is not None and c.sent]

    def shift_clock(self, seconds: float) -> None:
        """The clock behind the stamps was set by ``seconds``: move the times of open requests."""
        if self._client_closed_at is not None:
            self._client_closed_at += seconds
        for call in self._calls:
            call.shift(seconds)

    # ---- called by the parsers -------------------------------------------------------------------

    def request_started(self, method: bytes, target: bytes, head: Head) -> Call:
        """A request's head is whole. Raises UnreadableError beyond the bound on open requests."""
        if len(self._calls) >= self._shared.limits.open_calls:
            raise UnreadableError("open_requests")
        self._count += 1
        call = Call.of(f"{self._connection}-{self._count}", method, target, head, self._shared)
        self._calls.append(call)
        self._head_seen = self._head_seen or method == b"HEAD"
        return call

    def current_call(self) -> Call:
        """The call that the next response answers. Raises UnreadableError when there is none."""
        if not self._calls:
            raise UnreadableError("response_without_request")
        return self._calls[0]

    def head_pending(self) -> bool:
        """Whether a HEAD request may be waiting for its response, which has no body."""
        if self._head_seen and not self._calls:
            self._head_seen = False
        return self._head_seen

    def response_complete(self, at: float) -> None:
        """The current call's response is whole."""
        call = self._calls.popleft()
        record = call.finish(End.COMPLETE, at, self._origin, self._client_closed_at)
        if record is not None:
            self._records.append(record)

    def upgraded(self, at: float) -> None:
        """The server agreed to another protocol (101, or CONNECT): no more requests here."""
        self._shared.drops["upgraded"] += 1
        for call in self._calls:
            call.finish(End.LOST, at, self._origin)
        self._calls.clear()
        self._state = _State.OPAQUE

    @property
    def limits(self) -> Limits:
        """Bounds of this connection."""
        return self._shared.limits

    # ---- losing and finding ----------------------------------------------------------------------

    def _found_again(self, data: bytes) -> bool:
        if not data.startswith(_REQUEST_STARTS):
            return False
        self._resyncs += 1
        if self._resyncs > self._shared.limits.resyncs:
            self._state = _State.OPAQUE
            return False
        self._state = _State.FOLLOWING
        self._requests = RequestParser(self)
        self._responses = ResponseParser(self)
        return True

    def _stop(self, at: float) -> None:
        while self._calls:
            self._end(self._calls.popleft(), End.LOST, at)
        self._state = _State.OPAQUE

    def _lose(self, at: float, reason: str) -> None:
        """We no longer know where in a message we are: what is open ends as unknown."""
        self._shared.drops[reason] += 1
        self._stop(at)
        self._state = _State.LOST
        self._awaiting_response_start = True

    def _end(self, call: Call, end: End, at: float) -> None:
        record = call.finish(end, at, self._origin)
        if record is not None:
            self._records.append(record)

    def _taken(self) -> list[RequestRecord]:
        records, self._records = self._records, []
        return records

"""httptools' parsers, turned into calls: where messages begin and end, and the few headers kept."""

from __future__ import annotations

from typing import Protocol

import httptools

from servoscope.sidecar.wire.answer import clean
from servoscope.sidecar.wire.call import Call, Head
from servoscope.sidecar.wire.limits import Limits

__all__ = ["RequestParser", "ResponseParser", "UnreadableError"]

_HEADER_LENGTH = 128


class UnreadableError(Exception):
    """The bytes are no HTTP that we can follow. ``reason`` is the name of its counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Follower(Protocol):
    """What the parsers tell, and ask, the connection."""

    @property
    def limits(self) -> Limits: ...
    def request_started(self, method: bytes, target: bytes, head: Head) -> Call: ...
    def current_call(self) -> Call: ...
    def head_pending(self) -> bool: ...
    def response_complete(self, at: float) -> None: ...
    def upgraded(self, at: float) -> None: ...


class _NoBodyError(Exception):
    """Leaves httptools behind the head of a response to HEAD; never leaves this module."""


def _read_header(head: Head, name: bytes, value: bytes) -> None:
    """Keep ``value`` when ``name`` is on the allow-list, or says how to read the body."""
    match name.lower():
        case b"content-type":
            head.content_type = value[:_HEADER_LENGTH].lower()
        case b"content-encoding":
            head.coding = value[:_HEADER_LENGTH]
        case b"content-length":
            head.length = int(value) if value.isdigit() and len(value) < 19 else None
        case b"transfer-encoding":
            head.chunked = b"chunked" in value.lower()
        case b"x-request-type":
            head.hint = clean(value, _HEADER_LENGTH)
        case b"x-tenant":
            head.tenant = clean(value, _HEADER_LENGTH)
        case b"x-request-id":
            head.request_id = clean(value, _HEADER_LENGTH)


class _Silence:
    """Counts bytes that neither end a head nor belong to a body: nothing may go on for ever."""

    __slots__ = ("_limit", "_silent", "heard")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._silent = 0
        self.heard = False

    def fed(self, size: int) -> None:
        """``size`` bytes were read. Raises UnreadableError beyond the bound."""
        if self.heard:
            self.heard = False
            self._silent = 0
        else:
            self._silent += size
            if self._silent > self._limit:
                raise UnreadableError("endless_head")


class RequestParser:
    """The client's bytes."""

    def __init__(self, follower: _Follower) -> None:
        self._follower = follower
        self._silence = _Silence(follower.limits.silent_bytes)
        self._parser = httptools.HttpRequestParser(self)
        self._head = Head()
        self._target = b""
        self._call: Call | None = None
        self._at = 0.0
        self._plain_body = 0  # bytes of body left that the parser must not see

    def feed(self, data: bytes, at: float) -> None:
        """Read ``data``. Raises UnreadableError."""
        self._at = at
        while data:
            if self._plain_body:
                data = self._feed_plain_body(data)
                continue
            try:
                self._parser.feed_data(data)
                rest = b""
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
                self._upgrade_asked()
            except httptools.HttpParserError as error:
                raise _reason(error) from None
            self._silence.fed(len(data) - len(rest))
            data = rest

    def _upgrade_asked(self) -> None:
        """An upgrade was asked for; until the server agrees, HTTP goes on behind the body.

        The parser stops behind the head. Java's client asks for h2c on an ordinary POST.
        """
        call = self._call
        if call is None or call.method == b"CONNECT":
            return
        if self._head.chunked:
            raise UnreadableError("upgrade_with_chunked_body")
        self._plain_body = self._head.length or 0
        if not self._plain_body:
            call.request_complete(self._at)

    def _feed_plain_body(self, data: bytes) -> bytes:
        body, rest = data[: self._plain_body], data[self._plain_body :]
        self._plain_body -= len(body)
        if self._call is not None:
            self._call.request_bytes(body)
            if not self._plain_body:
                self._call.request_complete(self._at)
        return rest

    # ---- httptools -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request line begins."""
        self._head = Head()
        self._target = b""
        self._call = None

    def on_url(self, part: bytes) -> None:
        """Part of the request target."""
        self._target += part
        if len(self._target) > self._follower.limits.target_bytes:
            raise UnreadableError("long_target")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header (or trailer)."""
        if self._call is None:
            _read_header(self._head, name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._silence.heard = True
        method = self._parser.get_method()
        target, self._target = self._target, b""  # a query is the user's: not kept
        self._call = self._follower.request_started(method, target, self._head)

    def on_body(self, data: bytes) -> None:
        """Bytes of the body."""
        self._silence.heard = True
        if self._call is not None:
            self._call.request_bytes(data)

    def on_message_complete(self) -> None:
        """The request is whole (or, with an upgrade, its head is)."""
        self._silence.heard = True
        if self._call is not None and not self._parser.should_upgrade():
            self._call.request_complete(self._at)


class ResponseParser:
    """The server's bytes."""

    def __init__(self, follower: _Follower) -> None:
        self._follower = follower
        self._silence = _Silence(follower.limits.silent_bytes)
        self._parser = httptools.HttpResponseParser(self)
        self._head = Head()
        self._call: Call | None = None
        self._at = 0.0
        self._upgraded = False

    def feed(self, data: bytes, at: float) -> None:
        """Read ``data``. Raises UnreadableError."""
        self._at = at
        if not self._follower.head_pending():
            self._feed(data)
            return
        # httptools cannot be told that a response has no body, and only a line's end ends a head.
        for line in data.splitlines(keepends=True):
            self._feed(line)

    def _feed(self, data: bytes) -> None:
        if self._upgraded:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # on_headers_complete has told
        except httptools.HttpParserError as error:
            if not isinstance(error.__context__, _NoBodyError):
                raise _reason(error) from None
            self._call = None
            self._parser = httptools.HttpResponseParser(self)
            self._follower.response_complete(self._at)
        self._silence.fed(len(data))

    # ---- httptools -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A status line begins."""
        self._head = Head()
        self._call = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header (or trailer)."""
        if self._call is None:
            _read_header(self._head, name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._silence.heard = True
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return  # interim: the final response follows
        call = self._follower.current_call()
        if status == 101 or (call.method == b"CONNECT" and status < 300):
            self._upgraded = True
            self._follower.upgraded(self._at)
            return
        self._call = call
        call.response_head(status, self._head)
        if call.method == b"HEAD":
            raise _NoBodyError

    def on_body(self, data: bytes) -> None:
        """Bytes of the body."""
        self._silence.heard = True
        if self._call is not None:
            self._call.response_bytes(data, self._at)

    def on_message_complete(self) -> None:
        """The response is whole."""
        self._silence.heard = True
        if self._call is not None:
            self._call = None
            self._follower.response_complete(self._at)


def _reason(error: Exception) -> UnreadableError:
    """What stopped httptools: our own callback's error, or bytes that are no HTTP."""
    cause = error.__context__
    return cause if isinstance(cause, UnreadableError) else UnreadableError("malformed_http")

"""One request and its response, from first byte to RequestRecord. No sockets, no clock, no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from servoscope.exporters.records import RequestRecord
from servoscope.sidecar.sources.source import OpenRequest
from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.asked import Asked, read_request
from servoscope.sidecar.wire.coding import CodingError, Inflater, inflater_for
from servoscope.sidecar.wire.endpoints import Endpoint, endpoint_of
from servoscope.sidecar.wire.limits import Budget, Buffer, Limits
from servoscope.sidecar.wire.outcome import End, classify, phase_of
from servoscope.sidecar.wire.report import Origin, believed, build_record
from servoscope.sidecar.wire.sse import Event, EventSplitter

__all__ = ["Call", "Head", "Shared"]


@dataclass(slots=True)
class Head:
    """What is kept of a message's head. ``hint``, ``tenant``, ``request_id``: the allow-list."""

    hint: str | None = None
    tenant: str | None = None
    request_id: str | None = None
    content_type: bytes = b""
    coding: bytes = b""
    length: int | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """What all calls of a source share: bounds, memory, and the counters of what was given up."""

    limits: Limits
    budget: Budget
    drops: Counter[str]


class Call:
    """A request on the wire. Calls that are no inference requests only keep the order."""

    __slots__ = (
        "_inflater",
        "_request",
        "_request_inflater",
        "_response",
        "_shared",
        "_splitter",
        "_whole",
        "answer",
        "asked",
        "endpoint",
        "finished",
        "head",
        "method",
        "name",
        "received_at",
        "sent",
        "status",
        "until_close",
    )

    def __init__(
        self, name: str, method: bytes, endpoint: Endpoint | None, head: Head, shared: Shared
    ) -> None:
        self.name = name  # unique; the request id where neither side gave one
        self.method = method
        self.endpoint = endpoint
        self.head = head
        self.asked = Asked()
        self.answer = Answer(shared.limits.gaps)
        self.received_at: float | None = None
        self.sent = False  # the request is whole
        self.status: int | None = None
        self.until_close = False  # the response ends where the connection ends
        self.finished = False
        self._shared = shared
        self._request: Buffer | None = None
        self._request_inflater: Inflater | None = None
        self._response: Buffer | None = None
        self._inflater: Inflater | None = None
        self._splitter: EventSplitter | None = None
        self._whole: Buffer | None = None
        # llama.cpp takes JSON under any content type; a multipart body is audio.
        if endpoint is not None and not head.content_type.startswith(b"multipart/"):
            try:
                self._request_inflater = inflater_for(head.coding, shared.limits.decoded_bytes)
                self._request = Buffer(shared.limits.request_body_bytes, shared.budget)
            except CodingError:
                shared.drops["request_coding"] += 1

    @classmethod
    def of(cls, name: str, method: bytes, target: bytes, head: Head, shared: Shared) -> Call:
        """The call of a request line."""
        return cls(name, method, endpoint_of(method, target), head, shared)

    # ---- request ---------------------------------------------------------------------------------

    def request_bytes(self, data: bytes) -> None:
        """Bytes of the request's body."""
        if self._request is None or self.finished:
            return
        try:
            pieces: Iterable[bytes] = (
                (data,) if self._request_inflater is None else self._request_inflater.feed(data)
            )
            kept = all(self._request.append(piece) for piece in pieces)
        except CodingError:
            kept = False
        if not kept:
            self._shared.drops["request_body"] += 1
            self._request.clear()
            self._request = None

    def request_complete(self, at: float) -> None:
        """The last byte of the request came at ``at``."""
        self.sent = True
        if self.finished:
            return
        self.received_at = at
        if self._request is not None:
            asked = read_request(self._request.take())
            self._request = None
            if asked is not None:
                self.asked = asked

    # ---- response --------------------------------------------------------------------------------

    def response_head(self, status: int, head: Head) -> None:
        """Status and headers of the final (not 1xx) response."""
        self.status = status
        self.until_close = head.length is None and not head.chunked
        if self.endpoint is None or status >= 300:
            return  # the body of an error may repeat the prompt: it is not even looked at
        limits, budget = self._shared.limits, self._shared.budget
        media = head.content_type.partition(b";")[0].strip().lower()
        try:
            self._inflater = inflater_for(head.coding, limits.decoded_bytes)
        except CodingError:
            self._shared.drops["response_coding"] += 1
            return
        if media == b"text/event-stream":
            self._response = Buffer(limits.event_bytes, budget)
            self._splitter = EventSplitter(self._response)
        elif media.endswith(b"json"):
            self._whole = self._response = Buffer(limits.response_body_bytes, budget)

    def response_bytes(self, data: bytes, at: float) -> None:
        """Bytes of the response's body that came at ``at``."""
        if self._response is None or self.finished:
            return
        if self._inflater is None:
            self._response_piece(data, at)
            return
        try:
            for piece in self._inflater.feed(data):
                self._response_piece(piece, at)
        except CodingError:
            self._shared.drops["response_coding"] += 1
            self._forget_response()

    def _response_piece(self, data: bytes, at: float) -> None:
        if self._splitter is not None:
            if events := self._splitter.feed(data):
                self._events(events, at)
        elif self._whole is not None and not self._whole.append(data):
            self._shared.drops["response_body"] += 1
            self._forget_response()

    def _events(self, events: list[Event], at: float) -> None:
        answer, endpoint = self.answer, self.endpoint
        if endpoint is None:
            return
        for name, data in events:
            if data == b"[DONE]":
                answer.terminal_at = at
                continue
            if name == b"error":
                answer.error = True
                continue
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                self._shared.drops["malformed_event"] += 1
                continue
            if type(event) is dict:
                endpoint.read(event, answer, at)
            else:
                self._shared.drops["malformed_event"] += 1

    def _forget_response(self) -> None:
        if self._response is not None:
            self._response.clear()
        self._response = self._whole = self._splitter = self._inflater = None

    # ---- the end ---------------------------------------------------------------------------------

    def finish(
        self, end: End, at: float, origin: Origin, client_closed_at: float | None = None
    ) -> RequestRecord | None:
        """End the call at ``at``; its record, or None when it is no inference request.

        A client that closed its side (``client_closed_at``) may still be reading: only an answer
        that was cut short tells that the server saw it leave.
        """
        readable = self._response is not None
        if end is End.COMPLETE:
            whole = self._read_rest(at)
            if client_closed_at is not None and not self._concluded():
                end, at = End.CLIENT_CLOSED, client_closed_at
            elif not whole:
                self._shared.drops["malformed_body"] += 1
        oversize = self._splitter.oversize if self._splitter is not None else 0
        if oversize:
            self._shared.drops["event_size"] += oversize
        self.finished = True
        if self._request is not None:
            self._request.clear()
        self._request = None
        streamed = self._splitter is not None
        self._forget_response()
        if self.endpoint is None:
            return None
        marked = readable and not oversize and self.endpoint.generates
        outcome = classify(end, self.status, self.answer, ends_marked=marked and streamed)
        record = build_record(self, outcome, end, at, origin, streamed=streamed)
        if not believed(self.answer, record.e2e_seconds):
            self._shared.drops["timings"] += 1
        return record

    def _read_rest(self, at: float) -> bool:
        """The body is whole: read what waited for that. False when it is not what it says."""
        if self._splitter is not None:
            self._events(self._splitter.finish(), at)
        elif self._whole is not None and self.endpoint is not None:
            try:
                body = orjson.loads(self._whole.take())
            except orjson.JSONDecodeError:
                self.answer.error = True  # says that it is JSON, and is none
                return False
            # llama.cpp's /completion answers a list of prompts with a list.
            for part in body if type(body) is list else (body,):
                if type(part) is dict:
                    self.endpoint.read(part, self.answer, None)
        return True

    def _concluded(self) -> bool:
        """The answer itself says that it is whole (or is an error, or says nothing of the kind)."""
        if self.status is None or self.status >= 300 or self.endpoint is None:
            return True
        if self.answer.finish_reason is not None or self.answer.terminal_at is not None:
            return True
        return not self.endpoint.generates and not self.answer.error

    def open_request(self) -> OpenRequest:
        """The call as it is now, while it is open."""
        return OpenRequest(
            request_id=self.answer.response_id or self.head.request_id or self.name,
            phase=phase_of(None, self.answer),
            prompt_tokens=self.answer.prompt_tokens,
            received_unix_seconds=self.received_at,
            request_type_hint=self.head.hint,
            model_name=self.answer.model_name or self.asked.model_name,
        )

    def shift(self, seconds: float) -> None:
        """The clock of the stamps was set by ``seconds``: move what was noted before."""
        if self.received_at is not None:
            self.received_at += seconds
        self.answer.shift(seconds)

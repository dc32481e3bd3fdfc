"""Server-sent events out of bytes that are cut anywhere (WHATWG "event stream interpretation").

LF, CRLF and CR line ends, comments, several ``data`` lines. Every token of every answer passes
here, so the common case (one read = whole events of one ``data`` line) has a path without a
buffer.
"""

from __future__ import annotations

from servoscope.sidecar.wire.limits import Buffer

__all__ = ["Event", "EventSplitter"]

#: (event name or b"", data). The name is b"error" too for llama.cpp's ``error:`` lines.
Event = tuple[bytes, bytes]


class EventSplitter:
    """Bytes of one response body in, events out. ``oversize`` counts events given up."""

    __slots__ = ("_after_cr", "_buffer", "_last", "_skipping", "oversize")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._after_cr = False
        self._last = b""  # last byte fed, while an event is in the buffer or being skipped
        self._skipping = False
        self.oversize = 0

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; the events that they complete, in order."""
        if self._after_cr or b"\r" in data:
            data = self._normalized(data)
        if self._skipping or len(self._buffer):
            events, data = self._pending(data)
        else:
            events = []
        if data.endswith(b"\n\n"):
            return events + _events(data) if events else _events(data)
        end = data.rfind(b"\n\n") + 2
        if end > 1:
            events += _events(data[:end])
            data = data[end:]
        self._hold(data)
        return events

    def finish(self) -> list[Event]:
        """The body ended: the last event, when only its blank line is missing."""
        return _events(self._buffer.take())

    def clear(self) -> None:
        """Forget what was held back."""
        self._buffer.clear()
        self._last = b""

    def _normalized(self, data: bytes) -> bytes:
        """``data`` with LF line ends; a CR at its end is a line end already."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if data.endswith(b"\r"):
            self._after_cr = True
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _pending(self, data: bytes) -> tuple[list[Event], bytes]:
        """Complete the event in the buffer (or being skipped); its events and what follows."""
        end = (self._last + data).find(b"\n\n") + 2 - len(self._last)
        if end < 2 - len(self._last):
            self._hold(data)
            return [], b""
        head, rest = data[:end], data[end:]
        if self._skipping:
            self._skipping = False
            return [], rest
        if self._buffer.append(head):
            return _events(self._buffer.take()), rest
        self._buffer.clear()
        self.oversize += 1
        return [], rest

    def _hold(self, data: bytes) -> None:
        """Keep the beginning of an event; drop it, and what follows of it, when too large."""
        if not data:
            return
        self._last = data[-1:]
        if not self._skipping and not self._buffer.append(data):
            self._buffer.clear()
            self._skipping = True
            self.oversize += 1


def _events(whole: bytes) -> list[Event]:
    """Events of ``whole``, which ends at an event's end (or at the end of the body)."""
    events: list[Event] = []
    for block in whole.split(b"\n\n"):
        if block.startswith(b"data: ") and b"\n" not in block:
            events.append((b"", block[6:]))
        elif block and (event := _fields(block)) is not None:
            events.append(event)
    return events


def _fields(block: bytes) -> Event | None:
    """One event of several lines, or with comments; None when it carries no data."""
    name = b""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif field == b"error":
            name = b"error"
            data.append(value)
    return (name, b"\n".join(data)) if data else None

"""JSON lines, both directions of the plug-in wire: bounded decoding, compact encoding.

Pure and standard library only: the same code runs inside the engine and in the sidecar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["MAX_LINE_BYTES", "PROTOCOL", "LineDecoder", "encode_line"]

#: Version of the messages on both sockets. A peer with another number is refused, not guessed at.
PROTOCOL = 1
#: Longest line either side accepts. A record with 512 gaps is about 6 KB.
MAX_LINE_BYTES = 1 << 20


def encode_line(message: Mapping[str, Any]) -> bytes:
    """One message as one line. Raises ValueError for NaN or infinity (they are no JSON)."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class LineDecoder:
    """Bytes in, JSON objects out; what is no object, or too long, is counted and skipped.

    ``garbage`` counts lines that are no JSON object, ``oversize`` lines longer than the limit.
    Memory is bounded by ``max_line_bytes`` plus the bytes of one ``feed``.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._rest = bytearray()
        self._skipping = False  # inside a line that is already too long
        self.garbage = 0
        self.oversize = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The complete objects that ``data`` finished, in order."""
        found: list[dict[str, Any]] = []
        *complete, rest = data.split(b"\n")
        for part in complete:
            line = self._take(part)
            if line is not None and (message := self._parse(line)) is not None:
                found.append(message)
        if self._skipping:
            return found
        self._rest += rest
        if len(self._rest) > self._max:
            self._rest.clear()
            self._skipping = True
        return found

    def _take(self, part: bytes) -> bytes | None:
        """The line that ``part`` ends, or None when it was too long."""
        length = len(self._rest) + len(part)
        line = bytes(self._rest) + part if length <= self._max else None
        self._rest.clear()
        if self._skipping or line is None:
            self._skipping = False
            self.oversize += 1
            return None
        return line

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None  # an empty line is a keep-alive, not an error
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.garbage += 1
            return None
        return message

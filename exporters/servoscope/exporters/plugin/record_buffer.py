"""Bounded store of finished-request messages, kept until a reader acknowledges them.

The engine's thread only calls ``put``: one length check and one append, no lock, no system call.
Everything else runs in the socket's thread. Two bounds: the inbox (the engine's side; when the
socket's thread cannot keep up, the newest is dropped) and the kept records (when no sidecar
reads, the oldest is dropped). Both drops are counted.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

__all__ = ["DEFAULT_CAPACITY", "RecordBuffer"]

DEFAULT_CAPACITY = 10_000


class RecordBuffer:
    """Messages in order, numbered from 1."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} is below 1")
        self.capacity = capacity
        self.dropped_unread = 0  # oldest first, because nobody read
        self.dropped_inbox = 0  # newest, because the socket's thread was stuck
        self._inbox: deque[dict[str, Any]] = deque()
        self._kept: deque[dict[str, Any]] = deque()
        self._first = 1  # number of the oldest kept record

    def put(self, message: dict[str, Any]) -> None:
        """Take one message. Called in the engine's thread."""
        if len(self._inbox) >= self.capacity:
            self.dropped_inbox += 1
            return
        self._inbox.append(message)

    def settle(self) -> None:
        """Number what came in, and drop the oldest beyond the capacity."""
        for _ in range(len(self._inbox)):
            self._kept.append(self._inbox.popleft())
        while len(self._kept) > self.capacity:
            self._kept.popleft()
            self._first += 1
            self.dropped_unread += 1

    def after(self, seq: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """Up to ``limit`` records with a number above ``seq``."""
        start = max(0, seq + 1 - self._first)
        numbered = enumerate(islice(self._kept, start, start + limit), self._first + start)
        return list(numbered)

    def acknowledge(self, seq: int) -> None:
        """Forget the records up to ``seq``."""
        while self._kept and self._first <= seq:
            self._kept.popleft()
            self._first += 1

    @property
    def last(self) -> int:
        """Number of the newest record, 0 before the first."""
        return self._first + len(self._kept) - 1

    @property
    def acknowledged(self) -> int:
        """Number up to which records are gone."""
        return self._first - 1

    def __len__(self) -> int:
        return len(self._kept) + len(self._inbox)

    @property
    def dropped(self) -> int:
        """All drops since boot."""
        return self.dropped_unread + self.dropped_inbox

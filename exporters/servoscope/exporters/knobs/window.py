"""The batching window: admission is held for a moment, so that requests run together.

It lasts ``batch_window_seconds`` at most (MAX_WINDOW_SECONDS cap), counted from the first request
that arrived at an empty queue.
"""

from __future__ import annotations

from servoscope.exporters.knobs.bounds import Values

__all__ = ["MAX_WINDOW_SECONDS", "BatchWindow"]

MAX_WINDOW_SECONDS = 1.0


class BatchWindow:
    """Whether admission is held now. Lives in the engine's thread; pure but for its own state."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._arrivals = 0

    def arrived(self, now: float, waiting: int, values: Values) -> None:
        """A request comes in while ``waiting`` others wait: at an empty queue a window opens."""
        if self._deadline is not None:
            self._arrivals += 1
        elif values.batch_window_seconds > 0 and waiting == 0:
            self._deadline = now + min(values.batch_window_seconds, MAX_WINDOW_SECONDS)
            self._arrivals = 1

    def holds(self, now: float, waiting: int, values: Values) -> bool:
        """Hold admission in this step? Ends the window when it is time."""
        deadline = self._deadline
        if deadline is None:
            return False
        enough = values.batch_window_min_requests
        if (
            values.batch_window_seconds <= 0
            or waiting == 0
            or waiting > self._arrivals  # preempted requests joined: they must not be held
            or (enough > 0 and waiting >= enough)
            or now >= deadline
        ):
            self._deadline = None
            return False
        return True

"""Where the live view is drawn: the whole terminal, or one print after the other elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

__all__ = ["Screen"]

PLAIN_COLUMNS = 132

Draw = Callable[[int], RenderableType]  # width in columns -> picture


class Screen:
    """Shows one picture at a time. As a context it has the terminal for itself.

    On the terminal's second screen, as pagers and ``top`` do: when the terminal is resized it
    breaks and joins the lines that were written, so that nobody knows where the last picture
    begins; there each picture is written over everything. The last one stays on the first screen.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console = Console(file=out)
        self.live = self._console.is_terminal
        if not self.live:
            self._console = Console(file=out, width=PLAIN_COLUMNS)
        self._view: Live | None = None
        self._last: Draw | None = None

    def show(self, draw: Draw) -> None:
        """Show ``draw`` of the width that there is now."""
        self._last = draw
        if self._view is None:
            self._console.print(draw(self._console.width))
            return
        self._measure()
        self._view.update(draw(self._console.width), refresh=True)

    def again(self) -> None:
        """Show the last picture again: the terminal has another size."""
        if self._view is not None and self._last is not None:
            self.show(self._last)

    def _measure(self) -> None:
        # The terminal itself is asked: COLUMNS and LINES of the environment do not change with it.
        with contextlib.suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(self._out.fileno())
            if columns > 0 and rows > 0 and self._console.size != (columns, rows):
                self._console.size = (columns, rows)
                self._console.clear()

    def __enter__(self) -> Screen:
        if self.live:
            self._view = Live(console=self._console, auto_refresh=False, screen=True)
            self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.__exit__(kind, error, trace)
            if self._last is not None:
                self.show(self._last)

"""How commands that run for long are told to end: SIGINT or SIGTERM, in order, exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

__all__ = ["EXIT_CODES", "EXIT_CODES_AT_ONCE", "until_told"]

EXIT_CODES = (
    "Exit codes: 0 ended as told (Ctrl-C, SIGTERM), 1 it failed, 2 the command or the "
    "configuration is wrong, 130 interrupted before it had begun."
)
#: Of the commands that do one thing and end.
EXIT_CODES_AT_ONCE = (
    "Exit codes: 0 done, 1 it failed, 2 the command or the configuration is wrong, 130 interrupted."
)


async def until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; SIGINT or SIGTERM cancels it, and that is no error.

    Work that handles these signals itself takes them over when it begins to.
    """
    task = asyncio.ensure_future(work)
    told = False

    def end() -> None:
        nonlocal told
        told = True
        task.cancel()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not main thread
            loop.add_signal_handler(number, end)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
    finally:
        for number in numbers:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(number)

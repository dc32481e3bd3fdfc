"""Work beside a test that never outlives it.

A task that a failed test leaves behind is collected in the middle of some later test, whose fault
it then seems to be: one failure would become many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

__all__ = ["background"]

T = TypeVar("T")


@asynccontextmanager
async def background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """``work`` as a task; at the end of the block it is cancelled and waited for.

    What it raised is the test's business (await the task); at the end it is dropped.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

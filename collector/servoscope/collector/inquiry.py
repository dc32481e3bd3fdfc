"""Questions to the store, off the event loop and bounded: some at a time, some waiting, no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from servoscope.collector.intake import BusyError
from servoscope.collector.store import Store, StoreError

if TYPE_CHECKING:
    from servoscope.collector.config import CollectorConfig
    from servoscope.collector.overview import Read
    from servoscope.collector.telemetry import Telemetry

__all__ = ["Inquiry"]

THREADS = 2
Answer = TypeVar("Answer")


class Inquiry:
    """Runs questions on reading threads."""

    def __init__(self, store: Store, config: CollectorConfig, telemetry: Telemetry) -> None:
        self._read = partial(store.read, timeout_seconds=config.query_timeout_seconds)
        self._max_pending = config.max_pending_queries
        self._telemetry = telemetry
        self._pending = 0
        self._readers = ThreadPoolExecutor(THREADS, "read")

    async def ask(self, question: Callable[[Read], Answer]) -> Answer:
        """The answer of ``question`` to the store. Raises BusyError or StoreError."""
        if self._pending >= self._max_pending:
            self._telemetry.questions.labels("busy").inc()
            raise BusyError
        self._pending += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self._readers, question, self._read
            )
        except StoreError:
            self._telemetry.questions.labels("failed").inc()
            raise
        finally:
            self._pending -= 1
        self._telemetry.questions.labels("answered").inc()
        return answer

    def close(self) -> None:
        """Return when every question asked is answered."""
        self._readers.shutdown(wait=True)

"""The spool on a thread of its own: a slow or hanging disk never holds up the event loop.

Batches wait in a bounded queue; what finds no room there is not kept on disk, and counted.
"""

from __future__ import annotations

import asyncio
import queue
import threading

from servoscope.sidecar.publish.spool import Spool
from servoscope.sidecar.publish.spool_lines import Batch, Key

__all__ = ["SpoolThread"]

_MAX_WAITING = 64  # batches: more is a disk that does not answer
_END_SECONDS = 2.0


class SpoolThread:
    """``append`` and ``settle`` return at once."""

    def __init__(self, spool: Spool, *, max_waiting: int = _MAX_WAITING) -> None:
        self.spool = spool
        self.slow_records = 0  # not kept because the disk did not keep up
        self._max_waiting = max_waiting
        self._work: queue.SimpleQueue[Batch | Key | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _waiting
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the spool, in the background."""
        if self._thread is None:
            # A daemon: a disk that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="servoscope-spool", daemon=True)
            self._thread.start()

    def take_found(self) -> list[Batch]:
        """As ``Spool.take_found``."""
        return self.spool.take_found()

    @property
    def results(self) -> dict[str, int]:
        """Records by what became of them on the way to disk."""
        return {**self.spool.results, "slow": self.slow_records}

    def append(self, batch: Batch) -> bool:
        """Keep a batch; False when it is not: the disk is too far behind."""
        with self._lock:
            if self._thread is None or self._waiting >= self._max_waiting:
                self.slow_records += batch.records
                return False
            self._waiting += 1
        self._work.put(batch)
        return True

    def settle(self, key: Key) -> None:
        """A batch that was appended has come to its end."""
        if self._thread is not None:
            self._work.put(key)

    async def aclose(self) -> None:
        """Write what waits, for two seconds at most."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            await asyncio.to_thread(thread.join, _END_SECONDS)

    def _run(self) -> None:
        self.spool.open()
        while (work := self._work.get()) is not None:
            if isinstance(work, Batch):
                with self._lock:
                    self._waiting -= 1
                self.spool.append(work)
            else:
                self.spool.settle(work)
        self.spool.close()

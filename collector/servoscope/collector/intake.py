"""The way from a received body to the store, and its bounds.

Two threads: one decodes and judges, one writes, and takes all that waits into one transaction: its
fixed cost is then paid once for many small batches. A slot is taken before a body is read and given
back when it is stored, so at most ``max_pending_batches`` bodies are in memory; the next sender is
told to come again. Nothing is answered "stored" before it is committed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from servoscope.collector.clock import SETTLE_SECONDS, Clocks, Span
from servoscope.collector.ingest import IngestError, decode_body
from servoscope.collector.slo import judge
from servoscope.collector.store import Arrival, Inserted, Retention, Store, StoreError

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.collector.config import CollectorConfig
    from servoscope.collector.telemetry import Telemetry
    from servoscope.exporters.wire import Batch

__all__ = ["BusyError", "Intake"]

log = logging.getLogger(__name__)
DAY_SECONDS = 86_400.0
MAX_GROUP_ROWS = 20_000  # of one transaction; a single batch may be all of it


class BusyError(Exception):
    """No room now; the sender should come again after ``retry_seconds``."""

    retry_seconds = 1


class Intake:
    """Decodes, judges and stores batches, each exactly once, in the order they come."""

    def __init__(
        self,
        store: Store,
        objectives: Sequence[Objective],
        config: CollectorConfig,
        telemetry: Telemetry,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure = ""  # why the last write failed; empty when it did not
        self._store = store
        self._objectives = objectives
        self._config = config
        self._telemetry = telemetry
        self._clock = clock
        self._monotonic = monotonic
        self._clocks = Clocks()
        self._doubtful = False
        self._queue: deque[tuple[Arrival, Future[Inserted]]] = deque()  # bounded by the slots
        self._pending = 0
        self._closing = False
        self._decoder = ThreadPoolExecutor(1, "decode")
        self._writer = ThreadPoolExecutor(1, "write")
        telemetry.up.set(1)

    @property
    def closing(self) -> bool:
        """True once no new batch is taken."""
        return self._closing

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Room for one body. Raises BusyError when there is none."""
        if self._closing or self._pending >= self._config.max_pending_batches:
            self._telemetry.batches.labels("busy").inc()
            raise BusyError
        self._pending += 1
        self._telemetry.pending.set(self._pending)
        try:
            yield
        finally:
            self._pending -= 1
            self._telemetry.pending.set(self._pending)

    async def take(self, body: bytes, encoding: str) -> tuple[Batch, Inserted]:
        """Store one body (inside a slot). Raises IngestError or StoreError."""
        loop = asyncio.get_running_loop()
        try:
            batch, storing = await loop.run_in_executor(
                self._decoder, self._decode_and_queue, body, encoding
            )
        except IngestError:
            self._telemetry.batches.labels("refused").inc()
            raise
        return batch, await asyncio.wrap_future(storing)

    def _decode_and_queue(self, body: bytes, encoding: str) -> tuple[Batch, Future[Inserted]]:
        # Queued from here and not from the event loop: once the decoder has been shut down, all
        # that it decoded is with the writer.
        with self._telemetry.decode_seconds.time():
            now = self._clock()
            batch = decode_body(
                body, encoding, max_decoded_bytes=self._config.max_decoded_bytes, now=now
            )
            judgement = judge(self._objectives, batch.records, now)
            del batch.records  # the store writes columns; keep no second copy while waiting
        storing: Future[Inserted] = Future()
        self._queue.append((Arrival(batch, judgement), storing))
        self._writer.submit(self._write_waiting)
        return batch, storing

    # ---- the writing thread --------------------------------------------------------------------

    def _write_waiting(self) -> None:
        """Store what is waiting, up to a bound, in one transaction."""
        group: list[tuple[Arrival, Future[Inserted]]] = []
        rows = 0
        while self._queue and rows < MAX_GROUP_ROWS:
            group.append(self._queue.popleft())
            rows += len(group[-1][0].batch)
        if group and not self._write(group) and len(group) > 1:
            for (
                one
            ) in group:  # together they failed: each for itself, so that only the bad one does
                self._write([one])

    def _write(self, group: list[tuple[Arrival, Future[Inserted]]]) -> bool:
        """Store a group and answer for it; a group of many that fails is not answered for."""
        try:
            with self._telemetry.insert_seconds.time():
                answers = self._store.insert([arrival for arrival, _ in group], self._clock())
        except Exception as error:
            self._failed(error)
            if len(group) == 1:
                self._telemetry.batches.labels("failed").inc()
                group[0][1].set_exception(error)
            return False
        self._note_success()
        for (arrival, storing), answer in zip(group, answers, strict=True):
            self._telemetry.count(arrival.batch, duplicate=answer.duplicate)
            storing.set_result(answer)
        return True

    def _failed(self, error: Exception) -> None:
        self.failure = str(error)
        self._telemetry.up.set(0)
        log.error("%s", error)

    def _note_success(self) -> None:
        if self.failure:
            log.warning("the store takes records again")
        self.failure = ""
        self._telemetry.up.set(1)

    # ---- retention: the writer's other duty ----------------------------------------------------

    async def keep_within_bounds(self) -> None:
        """Delete what is too old or too much, for ever, at the configured interval."""
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(self._writer, self._retain)
            await asyncio.sleep(self._config.retention_interval_seconds)

    def _retain(self) -> None:
        config = self._config
        longest = max((o.window_seconds for o in self._objectives), default=0)
        rule = Retention(
            records_seconds=config.retention_days * DAY_SECONDS,
            verdicts_seconds=max(config.budget_retention_days * DAY_SECONDS, longest),
            keys_seconds=config.idempotency_hours * 3600.0,
            max_bytes=config.max_database_bytes,
        )
        started = time.monotonic()
        try:
            removed = self._store.retain(rule, self._span())
        except StoreError as error:
            self._failed(error)
            return
        by_reason = {"age": removed.by_age, "future": removed.by_future, "size": removed.by_size}
        for reason, count in by_reason.items():
            self._telemetry.expired_records.labels(reason).inc(count)
        if any(by_reason.values()):
            log.info(
                "retention deleted %d old records, %d from the future and %d for size in %.1f s",
                *by_reason.values(),
                time.monotonic() - started,
            )

    def _span(self) -> Span:
        """Now, as far as the clock can be believed. Raises StoreError."""
        span = self._clocks.now(self._clock(), self._monotonic(), self._store.newest_unix_seconds())
        if span.doubtful and not self._doubtful:
            log.warning(
                "the clock is %.1f days from where it was: retention goes by the earlier time "
                "until the clock has stayed there for %g h",
                (span.latest - span.earliest) / DAY_SECONDS,
                SETTLE_SECONDS / 3600.0,
            )
        self._doubtful = span.doubtful
        self._telemetry.clock_doubtful.set(span.doubtful)
        return span

    def close(self) -> None:
        """Take nothing new, and return when everything taken is stored."""
        self._closing = True
        self._decoder.shutdown(wait=True)
        self._writer.shutdown(wait=True)

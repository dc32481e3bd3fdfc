"""Records to the collector: a bounded queue, bounded retry, and never a wait for the giver.

Every interval what has come is made a batch. A batch keeps its key (sidecar, epoch, seq) and its
rows over all its tries, so the collector counts it once however often an answer is lost; with a
spool also over the end of this process, whatever ended it. When the collector is away the oldest
records go first; everything that goes is counted.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import aiohttp

from servoscope.exporters.wire import encode_batch
from servoscope.sidecar.publish.spool_lines import Batch, Key

if TYPE_CHECKING:
    from servoscope.exporters.records import RequestRecord

__all__ = ["Answer", "Keeper", "Post", "Pusher", "http_post"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_ANSWER_SECONDS = 10.0


class Answer:
    """What became of one try: accepted, refused for good, or to be tried again."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    RETRY = "retry"
    AWAY = "away"  # nobody took the connection: try again, for as long as the queue holds


Post = Callable[[bytes], Awaitable[str]]


def http_post(session: aiohttp.ClientSession, collector_url: str, token: str = "") -> Post:
    """Send one gzip-compressed JSON batch to ``collector_url``/api/v1/records."""
    url = collector_url.rstrip("/") + "/api/v1/records"
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)

    async def post(body: bytes) -> str:
        try:
            async with session.post(url, data=body, headers=headers, timeout=timeout) as answer:
                if answer.status < 300:
                    return Answer.ACCEPTED
                if answer.status in (408, 425, 429) or answer.status >= 500:
                    return Answer.RETRY
                log.warning("the collector refused a batch: HTTP %d", answer.status)
                return Answer.REFUSED
        except aiohttp.ClientConnectorError:
            return Answer.AWAY
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Answer.RETRY

    return post


class Keeper(Protocol):
    """Where batches outlive this process: ``SpoolThread``."""

    def start(self) -> None:
        """Begin to read what an earlier life left."""

    def take_found(self) -> list[Batch]:
        """What was found since, oldest first."""

    def append(self, batch: Batch) -> bool:
        """Keep a batch; False when it is not."""

    def settle(self, key: Key) -> None:
        """A batch has come to its end."""


class Pusher:
    """``offer`` is called for every record; ``run`` sends them until cancelled."""

    def __init__(
        self,
        post: Post,
        *,
        sidecar_id: str,
        epoch: int,
        queue_records: int = 20_000,
        batch_records: int = 1_000,
        interval_seconds: float = 1.0,
        attempts: int = 10,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spool: Keeper | None = None,
    ) -> None:
        self._post = post
        self._sidecar_id = sidecar_id
        self._epoch = epoch
        self._seq = 0
        self._queue: deque[RequestRecord] = deque()  # in no batch yet
        self._batches: deque[Batch] = deque()
        self._waiting = 0  # records of both
        self._under_way: Batch | None = None
        self._ready = asyncio.Event()
        self._queue_records = queue_records
        self._batch_records = batch_records
        self._interval_seconds = interval_seconds
        self._attempts = attempts
        self._sleep = sleep
        self._spool = spool
        self._unkept: set[Key] = set()  # batches that the spool did not take
        self.results: Counter[str] = Counter({"accepted": 0, "dropped": 0, "refused": 0})

    def __len__(self) -> int:
        """Records that are neither accepted nor given up: waiting, or under way."""
        return self._waiting + (self._under_way.records if self._under_way else 0)

    def offer(self, record: RequestRecord) -> None:
        """Queue one record; the oldest go, and are counted, when the queue is full."""
        if self._waiting >= self._queue_records:
            self._drop_oldest()
        self._queue.append(record)
        self._waiting += 1

    async def run(self) -> None:
        """Make batches and send them, for ever."""
        if self._spool is not None:
            self._spool.start()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._make_batches())
            both.create_task(self._send_batches())

    async def flush(self) -> None:
        """One try for each batch not yet settled, on the way out; what fails is dropped.

        With a spool it is not: it goes after the next start. The batch that was under way when
        ``run`` was cancelled goes again under its own key: the collector may have it already, and
        then counts it once.
        """
        self._take_found()
        while self._queue:
            self._next_batch()
        while batch := self._next_under_way():
            answer = await self._post(batch.body)
            if answer in (Answer.RETRY, Answer.AWAY):
                self._leave()
                return
            self._settle(answer)

    async def _make_batches(self) -> None:
        while True:
            await self._sleep(self._interval_seconds)
            self._take_found()
            while self._queue:
                self._next_batch()
                await asyncio.sleep(0)  # a large batch takes some milliseconds
            if self._batches:
                self._ready.set()

    async def _send_batches(self) -> None:
        while True:
            await self._ready.wait()
            while batch := self._next_under_way():
                await self._send(batch)
            self._ready.clear()

    def _take_found(self) -> None:
        """What an earlier life left goes first, as far as there is room: the newest of it."""
        for batch in reversed(self._spool.take_found() if self._spool is not None else []):
            if self._waiting + batch.records <= self._queue_records:
                self._batches.appendleft(batch)
                self._waiting += batch.records
            else:
                self._gone(batch, "dropped")

    def _next_batch(self) -> None:
        """What waits longest, encoded, and kept on disk."""
        n = min(self._batch_records, len(self._queue))
        body = self._body([self._queue.popleft() for _ in range(n)])
        batch = Batch(self._epoch, self._seq, n, body)
        self._batches.append(batch)
        if self._spool is not None and not self._spool.append(batch):
            self._unkept.add(batch.key)

    def _body(self, batch: Sequence[RequestRecord]) -> bytes:
        self._seq += 1
        form = encode_batch(batch, sidecar_id=self._sidecar_id, epoch=self._epoch, seq=self._seq)
        return gzip.compress(json.dumps(form, separators=(",", ":")).encode(), compresslevel=1)

    def _next_under_way(self) -> Batch | None:
        """The batch to send now; it stays under way until it is settled."""
        if self._under_way is None and self._batches:
            self._under_way = self._batches.popleft()
            self._waiting -= self._under_way.records
        return self._under_way

    async def _send(self, batch: Batch) -> None:
        pause, attempt = _FIRST_PAUSE_SECONDS, 0
        while attempt < self._attempts:
            answer = await self._post(batch.body)
            if answer not in (Answer.RETRY, Answer.AWAY):
                self._settle(answer)
                return
            attempt += answer == Answer.RETRY
            if attempt < self._attempts:
                await self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._settle("dropped")

    def _settle(self, result: str) -> None:
        """The batch under way has come to its end."""
        batch, self._under_way = self._under_way, None
        if batch is not None:
            self._gone(batch, result)

    def _drop_oldest(self) -> None:
        if self._batches:
            batch = self._batches.popleft()
            self._waiting -= batch.records
            self._gone(batch, "dropped")
        else:
            self._queue.popleft()
            self._waiting -= 1
            self.results["dropped"] += 1

    def _gone(self, batch: Batch, result: str) -> None:
        self.results[result] += batch.records
        self._unkept.discard(batch.key)
        if self._spool is not None:
            self._spool.settle(batch.key)

    def _leave(self) -> None:
        """The collector does not take what is left: it is on disk for the next life, or lost."""
        left = [*([self._under_way] if self._under_way else []), *self._batches]
        self._under_way, self._waiting = None, 0
        self._batches.clear()
        kept = 0
        for batch in left:
            if self._spool is None or batch.key in self._unkept:
                self._gone(batch, "dropped")
            else:
                kept += batch.records
        if kept:
            log.warning("the collector is away: %d records wait in the spool", kept)

"""Records to the collector: a bounded queue, bounded retry, and never a wait for the giver.

A batch keeps its key (sidecar, epoch, seq) and its rows over all its tries, so the collector counts
it once however often an answer is lost. When the collector is away the oldest records go first;
everything that goes is counted.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import aiohttp

from servoscope.exporters.wire import encode_batch

if TYPE_CHECKING:
    from servoscope.exporters.records import RequestRecord

__all__ = ["Answer", "Post", "Pusher", "http_post"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_ANSWER_SECONDS = 10.0


class Answer:
    """What became of one try: accepted, refused for good, or to be tried again."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    RETRY = "retry"


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
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Answer.RETRY

    return post


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
    ) -> None:
        self._post = post
        self._sidecar_id = sidecar_id
        self._epoch = epoch
        self._seq = 0
        self._queue: deque[RequestRecord] = deque()
        self._under_way: tuple[bytes, int] | None = None  # the body being sent, its records
        self._queue_records = queue_records
        self._batch_records = batch_records
        self._interval_seconds = interval_seconds
        self._attempts = attempts
        self._sleep = sleep
        self.results: Counter[str] = Counter({"accepted": 0, "dropped": 0, "refused": 0})

    def __len__(self) -> int:
        """Records that are neither accepted nor given up: queued, or under way."""
        return len(self._queue) + (self._under_way[1] if self._under_way else 0)

    def offer(self, record: RequestRecord) -> None:
        """Queue one record; the oldest is dropped, and counted, when the queue is full."""
        if len(self._queue) >= self._queue_records:
            self._queue.popleft()
            self.results["dropped"] += 1
        self._queue.append(record)

    async def run(self) -> None:
        """Send what is queued, a batch at a time, for ever."""
        while True:
            await self._sleep(self._interval_seconds)
            while self._queue:
                await self._send(self._next_body())

    async def flush(self) -> None:
        """One try for each batch not yet settled, on the way out; what fails is dropped.

        The batch that was under way when ``run`` was cancelled goes again under its own key: the
        collector may have it already, and then counts it once.
        """
        while self._under_way or self._queue:
            body = self._under_way[0] if self._under_way else self._next_body()
            answer = await self._post(body)
            self._settle(answer if answer != Answer.RETRY else "dropped")
            if answer == Answer.RETRY:
                self.results["dropped"] += len(self._queue)
                self._queue.clear()

    def _next_body(self) -> bytes:
        """The next batch, encoded; it is under way until ``_settle``."""
        n = min(self._batch_records, len(self._queue))
        body = self._body([self._queue.popleft() for _ in range(n)])
        self._under_way = (body, n)
        return body

    def _body(self, batch: Sequence[RequestRecord]) -> bytes:
        self._seq += 1
        form = encode_batch(batch, sidecar_id=self._sidecar_id, epoch=self._epoch, seq=self._seq)
        return gzip.compress(json.dumps(form, separators=(",", ":")).encode(), compresslevel=1)

    async def _send(self, body: bytes) -> None:
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, self._attempts + 1):
            answer = await self._post(body)
            if answer != Answer.RETRY:
                self._settle(answer)
                return
            if attempt < self._attempts:
                await self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._settle("dropped")

    def _settle(self, result: str) -> None:
        """The batch under way has come to its end."""
        if self._under_way is not None:
            self.results[result] += self._under_way[1]
            self._under_way = None

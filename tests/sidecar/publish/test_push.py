"""Records to the collector: once, bounded, and never a wait for the giver."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from servoscope.exporters.records import RequestRecord
from servoscope.exporters.wire import decode_batch
from servoscope.sidecar.publish.push import Answer, Pusher, http_post

Make = Callable[..., RequestRecord]


class FakeCollector:
    """Answers from a script; keeps the bodies."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, body: bytes) -> str:
        self.bodies.append(json.loads(gzip.decompress(body)))
        return self.answers.pop(0) if self.answers else Answer.ACCEPTED


async def no_sleep(_seconds: float) -> None:
    await asyncio.sleep(0)


def pusher(post: Any, **changes: Any) -> Pusher:
    settings: dict[str, Any] = {"sidecar_id": "s", "epoch": 7, "sleep": no_sleep, **changes}
    return Pusher(post, **settings)


async def run_until(subject: Pusher, done: Callable[[], bool]) -> None:
    task = asyncio.create_task(subject.run())
    async with asyncio.timeout(10):
        while not done():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_records_go_out_in_batches_with_rising_numbers(make_record: Make) -> None:
    post = FakeCollector()
    subject = pusher(post, batch_records=2)
    for i in range(5):
        subject.offer(make_record(request_id=f"r{i}"))
    await run_until(subject, lambda: subject.results["accepted"] == 5)
    batches = [decode_batch(body) for body in post.bodies]
    assert [b.key for b in batches] == [("s", 7, 1), ("s", 7, 2), ("s", 7, 3)]
    assert [r.request_id for b in batches for r in b.records] == [f"r{i}" for i in range(5)]


async def test_a_retry_keeps_key_and_rows(make_record: Make) -> None:
    post = FakeCollector(Answer.RETRY, Answer.RETRY, Answer.ACCEPTED)
    subject = pusher(post)
    subject.offer(make_record())
    await run_until(subject, lambda: subject.results["accepted"] == 1)
    assert post.bodies[0] == post.bodies[1] == post.bodies[2]


async def test_retries_are_bounded_and_the_next_batch_goes_on(make_record: Make) -> None:
    post = FakeCollector(*[Answer.RETRY] * 3)
    subject = pusher(post, attempts=3, batch_records=1)
    subject.offer(make_record(request_id="poison"))
    subject.offer(make_record(request_id="good"))
    await run_until(subject, lambda: subject.results["accepted"] == 1)
    assert subject.results["dropped"] == 1
    assert len(post.bodies) == 4


async def test_a_refused_batch_is_not_sent_again(make_record: Make) -> None:
    post = FakeCollector(Answer.REFUSED)
    subject = pusher(post)
    subject.offer(make_record())
    await run_until(subject, lambda: subject.results["refused"] == 1)
    assert len(post.bodies) == 1


async def test_at_100_times_the_cap_the_queue_is_bounded_and_drops_are_counted(
    make_record: Make,
) -> None:
    async def never(_body: bytes) -> str:
        await asyncio.Event().wait()
        return Answer.ACCEPTED

    subject = pusher(never, queue_records=100, batch_records=10)
    task = asyncio.create_task(subject.run())
    for _ in range(3):
        await asyncio.sleep(0)
    for _ in range(10_000):
        subject.offer(make_record())
    assert len(subject) == 100
    assert subject.results["dropped"] == 9_900
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_flush_tries_once_and_counts_what_is_lost(make_record: Make) -> None:
    post = FakeCollector(Answer.ACCEPTED, Answer.RETRY)
    subject = pusher(post, batch_records=1)
    for _ in range(4):
        subject.offer(make_record())
    await subject.flush()
    assert dict(subject.results) == {"accepted": 1, "dropped": 3, "refused": 0}
    assert len(subject) == 0


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, "accepted"), (202, "accepted"), (400, "refused"), (401, "refused"), (413, "refused"),
     (429, "retry"), (500, "retry"), (503, "retry")],
)  # fmt: skip
async def test_status_codes(status: int, expected: str) -> None:
    seen: list[tuple[Any, ...]] = []

    async def records(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization"), await request.json()))
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/api/v1/records", records)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with aiohttp.ClientSession() as session:
            body = gzip.compress(b'{"a": 1}')
            assert await http_post(session, url, "word")(body) == expected
    finally:
        await runner.cleanup()
    assert seen == [("Bearer word", {"a": 1})]


async def test_nobody_there_is_a_retry(unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as session:
        post = http_post(session, f"http://127.0.0.1:{unused_tcp_port}")
        assert await post(b"") == Answer.AWAY


async def test_a_dead_collector_does_not_slow_the_giver(make_record: Make) -> None:
    """Offering costs the same whether batches hang or are taken: no await, no I/O."""

    async def hang(_body: bytes) -> str:
        await asyncio.Event().wait()
        return Answer.ACCEPTED

    records = [make_record() for _ in range(2_000)]

    async def cost(post: Any) -> float:
        subject = pusher(post, queue_records=500)
        task = asyncio.create_task(subject.run())
        await asyncio.sleep(0)
        start = time.process_time()
        for record in records:
            subject.offer(record)
        spent = time.process_time() - start
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return spent

    assert not asyncio.iscoroutinefunction(Pusher.offer)
    assert await cost(hang) < 1.0  # 2,000 offers: a bound on waiting, not a speed claim


async def test_what_was_under_way_at_the_end_goes_again_under_its_own_key(
    make_record: Make,
) -> None:
    bodies: list[dict[str, Any]] = []
    stuck = asyncio.Event()

    async def post(body: bytes) -> str:
        bodies.append(json.loads(gzip.decompress(body)))
        if len(bodies) == 1:
            stuck.set()
            await asyncio.Event().wait()  # the answer never comes
        return Answer.ACCEPTED

    subject = pusher(post, batch_records=3)
    for i in range(5):
        subject.offer(make_record(request_id=f"r{i}"))
    await run_until(subject, stuck.is_set)
    assert len(subject) == 5  # none is settled
    await subject.flush()
    assert [body["seq"] for body in bodies] == [1, 1, 2]
    assert bodies[0] == bodies[1]
    assert subject.results == {"accepted": 5, "dropped": 0, "refused": 0}
    assert len(subject) == 0


@pytest.mark.parametrize("answers", [[Answer.RETRY], [Answer.REFUSED, Answer.RETRY]])
async def test_every_record_offered_is_accounted_for(make_record: Make, answers: list[str]) -> None:
    subject = pusher(FakeCollector(*answers), batch_records=2)
    for i in range(5):
        subject.offer(make_record(request_id=f"r{i}"))
    await subject.flush()
    assert sum(subject.results.values()) + len(subject) == 5

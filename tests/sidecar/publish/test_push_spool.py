"""The way to the collector over the end of the sidecar: kill -9, SIGTERM, a disk that hangs."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.background import background
from servoscope.alerts.spec import default_spec
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.exporters.records import RequestRecord
from servoscope.exporters.wire import decode_batch
from servoscope.sidecar.publish.push import Answer, Post, Pusher, http_post
from servoscope.sidecar.publish.spool import Spool
from servoscope.sidecar.publish.spool_lines import Batch
from servoscope.sidecar.publish.spool_thread import SpoolThread

Make = Callable[..., RequestRecord]
FIRST_SECONDS = 1_800_000_000

#: A sidecar's way to the collector: argv: state, port, epoch; a number on stdin is so many records.
SENDER = """
import asyncio, sys, time
from pathlib import Path
import aiohttp
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.sidecar.publish.push import Pusher, http_post
from servoscope.sidecar.publish.spool import Spool
from servoscope.sidecar.publish.spool_thread import SpoolThread
state, port, epoch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

async def main():
    async with aiohttp.ClientSession() as session:
        thread = SpoolThread(Spool(state, "h:1", 10_000_000, time.time))
        pusher = Pusher(http_post(session, f"http://127.0.0.1:{port}"), sidecar_id="host/h:1",
            epoch=epoch, batch_records=7, interval_seconds=0.01, spool=thread)
        running = asyncio.ensure_future(pusher.run())
        made = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            left = int(line)
            while left:
                for _ in range(part := min(left, 100)):  # 15 batches: the spool's queue takes 64
                    pusher.offer(RequestRecord(request_id=f"{epoch}-{made}", source=Source.PLUGIN,
                        outcome=Outcome.COMPLETED, finished_unix_seconds=time.time()))
                    made += 1
                left -= part
                while sum(thread.results[w] for w in ("written", "slow", "full", "failed")) < made:
                    await asyncio.sleep(0.001)
            print("kept" if thread.results["written"] == made else thread.results, flush=True)

asyncio.run(main())
"""


class Sender:
    """A process that will be killed."""

    def __init__(self, state: Path, port: int, epoch: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(state), str(port), str(epoch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def give(self, records: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{records}\n")
        self.process.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60)
        assert line.strip() == "kept"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=10)


@pytest.fixture
def senders() -> Any:
    made: list[Sender] = []
    yield made
    for one in made:
        if one.process.poll() is None:
            one.kill()


@asynccontextmanager
async def collector(database: Path, port: int = 0) -> AsyncIterator[str]:
    """A real one, and its URL."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = CollectorConfig(port=port, database=database, threads=1)
    objectives = default_spec().objectives
    async with background(run_collector(config, objectives, on_ready=url.set_result)):
        yield await asyncio.wait_for(url, 20)


async def stored(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Records and verdicts (of the errors objective) that the collector has."""
    async with session.get(f"{url}/api/v1/overview") as answer:
        found = await answer.json()
    return sum(row["requests"] for row in found["rows"]), sum(
        budget["total"] for budget in found["budgets"] if budget["objective"] == "errors"
    )


async def until(done: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0.005)


OPENED: list[SpoolThread] = []


def keeper(state: Path, **changes: Any) -> SpoolThread:
    made = SpoolThread(Spool(state, "h:1", 10_000_000, time.time), **changes)
    OPENED.append(made)
    return made


@pytest.fixture(autouse=True)
async def _closed_spools() -> AsyncIterator[None]:
    """Also those of a test that failed."""
    yield
    for one in OPENED:
        await one.aclose()
        one.spool._let_go()
    OPENED.clear()


def pusher(post: Post, spool: Any, **changes: Any) -> Pusher:
    settings: dict[str, Any] = {"sidecar_id": "host/h:1", "epoch": 99, "interval_seconds": 0.005}
    return Pusher(post, spool=spool, **{**settings, **changes})


async def test_kill_9_loses_nothing_and_the_collector_counts_once(
    tmp_path: Path, unused_tcp_port: int, senders: list[Sender]
) -> None:
    """Two lives end by kill -9: one while the collector is away, one with it there."""
    state = tmp_path / "spool"
    senders.append(Sender(state, unused_tcp_port, 1))
    await senders[0].give(500)
    senders[0].kill()
    async with (
        aiohttp.ClientSession() as session,
        collector(tmp_path / "c.duckdb", unused_tcp_port) as url,
    ):
        senders.append(Sender(state, unused_tcp_port, 2))
        await senders[1].give(300)
        senders[1].kill()  # somewhere between sent, stored, answered and settled
        spool = keeper(state)
        third = pusher(http_post(session, url), spool)
        async with background(third.run()):
            await until(lambda: spool.spool.ready)
            restored = spool.results["restored"]
            await until(lambda: third.results["accepted"] == restored)
        await spool.aclose()
        assert await stored(session, url) == (800, 800)


async def test_a_batch_that_was_stored_and_not_settled_is_told_as_a_duplicate(
    tmp_path: Path, make_record: Make
) -> None:
    answers: list[Any] = []
    async with collector(tmp_path / "c.duckdb") as url, aiohttp.ClientSession() as session:

        async def stored_and_killed(body: bytes) -> str:
            async with session.post(
                f"{url}/api/v1/records", data=body,
                headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
            ) as answer:  # fmt: skip
                answers.append(await answer.json())
            await asyncio.Event().wait()  # the answer is never heard
            return Answer.ACCEPTED

        spool = keeper(tmp_path / "spool")
        first = pusher(stored_and_killed, spool)
        for i in range(10):
            first.offer(make_record(request_id=f"r{i}", finished_unix_seconds=time.time()))
        async with background(first.run()):
            await until(lambda: answers and not spool._waiting)
        await spool.aclose()
        spool = keeper(tmp_path / "spool")
        second = pusher(http_post(session, url), spool, epoch=100)
        async with background(second.run()):
            await until(lambda: second.results["accepted"] == 10)
        await spool.aclose()
        assert answers[0]["duplicate"] is False
        assert (await stored(session, url))[0] == 10
    assert not spool.spool.path.exists()  # all is settled


async def test_the_end_without_a_collector_keeps_all_for_the_next_life(
    tmp_path: Path, make_record: Make
) -> None:
    async def away(_body: bytes) -> str:
        return Answer.AWAY

    spool = keeper(tmp_path)
    first = pusher(away, spool, batch_records=4, interval_seconds=3600.0, epoch=5)
    spool.start()
    for i in range(10):
        first.offer(make_record(request_id=f"r{i}"))
    await first.flush()
    await spool.aclose()
    assert first.results == {"accepted": 0, "dropped": 0, "refused": 0}
    bodies: list[Any] = []

    async def post(body: bytes) -> str:
        bodies.append(decode_batch(json.loads(gzip.decompress(body))))
        return Answer.ACCEPTED

    spool = keeper(tmp_path)
    second = pusher(post, spool)
    async with background(second.run()):
        await until(lambda: second.results["accepted"] == 10)
        second.offer(make_record(request_id="new"))
        await until(lambda: second.results["accepted"] == 11)
    await spool.aclose()
    assert [b.key for b in bodies] == [
        ("host/h:1", 5, 1), ("host/h:1", 5, 2), ("host/h:1", 5, 3), ("host/h:1", 99, 1),
    ]  # fmt: skip
    assert [r.request_id for b in bodies for r in b.records] == [
        *(f"r{i}" for i in range(10)), "new",
    ]  # fmt: skip


async def test_a_collector_that_is_away_costs_no_try(tmp_path: Path, make_record: Make) -> None:
    answers = [Answer.AWAY] * 50 + [Answer.ACCEPTED]

    async def post(_body: bytes) -> str:
        return answers.pop(0)

    async def no_sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    subject = pusher(post, None, attempts=2, sleep=no_sleep)
    subject.offer(make_record())
    async with background(subject.run()):
        await until(lambda: subject.results["accepted"] == 1)
    assert subject.results["dropped"] == 0


async def test_what_finds_no_room_is_dropped_from_the_oldest_and_settled(
    tmp_path: Path, make_record: Make
) -> None:
    """Also on disk: the next life must not send what this one has counted as dropped."""

    async def hang(_body: bytes) -> str:
        await asyncio.Event().wait()
        return Answer.ACCEPTED

    spool = keeper(tmp_path)
    subject = pusher(hang, spool, queue_records=20, batch_records=5)
    async with background(subject.run()):
        for turn in range(10):
            for i in range(5):
                subject.offer(make_record(request_id=f"{turn}-{i}"))
            await until(lambda: not subject._queue)
        assert len(subject) <= 25
        assert subject.results["dropped"] + len(subject) == 50
        left = len(subject)
    await spool.aclose()
    spool = keeper(tmp_path)
    spool.spool.open()
    found = spool.take_found()
    spool.spool._let_go()
    assert sum(b.records for b in found) == left
    assert found[-1].seq == 10


async def test_more_than_fits_is_restored_from_the_newest(tmp_path: Path) -> None:
    spool = keeper(tmp_path)
    spool.spool.open()
    for seq in range(10):
        spool.spool.append(Batch(1, seq, 5, b"x"))
    spool.spool._let_go()
    again = keeper(tmp_path)
    again.spool.open()

    async def away(_body: bytes) -> str:
        return Answer.AWAY

    subject = pusher(away, again, queue_records=20)
    subject._take_found()
    assert [b.seq for b in subject._batches] == [6, 7, 8, 9]
    assert (len(subject), subject.results["dropped"]) == (20, 30)
    again.spool._let_go()


async def test_a_disk_that_hangs_holds_up_nobody(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Spool, "append", lambda *_: go_on.wait(30))
    bodies: list[bytes] = []

    async def post(body: bytes) -> str:
        bodies.append(body)
        return Answer.ACCEPTED

    spool = keeper(tmp_path, max_waiting=3)
    subject = pusher(post, spool, batch_records=1)
    try:
        async with background(subject.run()):
            for _ in range(20):
                subject.offer(make_record())
            await until(lambda: subject.results["accepted"] == 20)
        assert len(bodies) == 20
        assert spool.results["slow"] >= 16  # one hangs, three wait
    finally:
        go_on.set()
    await spool.aclose()


async def test_no_text_of_a_request_is_on_disk(tmp_path: Path, make_record: Make) -> None:
    """A record holds none; a field that is not on the wire stays away from the disk too."""
    spool = keeper(tmp_path)
    spool.start()

    async def away(_body: bytes) -> str:
        return Answer.AWAY

    subject = pusher(away, spool)
    subject.offer(make_record(inter_token_seconds=(0.125,) * 5))
    await subject.flush()
    await spool.aclose()
    spool.spool.open()
    (batch,) = spool.take_found()
    spool.spool._let_go()
    assert "inter_token_seconds" not in json.loads(gzip.decompress(batch.body))["columns"]

"""kill -9 at the worst moments: nothing is lost, nothing is counted twice.

The collector runs in a process of its own and is killed before or after a commit, or at any moment
under load. The sender does what a sidecar does: it sends a batch again until it is answered.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.exporters.wire import encode_batch

#: argv: database, port, the moment at which the process kills itself ("" for never).
SERVER = """
import asyncio, os, signal, sys
from pathlib import Path
from servoscope.alerts.spec import default_spec
from servoscope.collector import store
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig

path, port, moment = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "before commit":
    store.see_sidecars = lambda *_: die()
elif moment == "after commit":
    insert = store.Store.insert
    store.Store.insert = lambda *args: (insert(*args), die())
elif moment == "during decode":
    from servoscope.collector import intake
    intake.decode_body = lambda *_, **__: die()

asyncio.run(run_collector(
    CollectorConfig(port=int(port), database=Path(path)), default_spec().objectives,
    on_ready=lambda url: print(url, flush=True),
))
"""


class Process:
    """A collector in a process of its own."""

    def __init__(self, path: Path, port: int, moment: str = "") -> None:
        self.port = port
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER, str(path), str(port), moment],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), self.process.communicate(timeout=30)[1]

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: list[Process] = []

    def start_(moment: str = "") -> Process:
        started.append(Process(tmp_path / "collector.duckdb", port, moment))
        return started[-1]

    yield start_
    for one in started:
        if one.process.poll() is None:
            one.kill()


def call(port: int, method: str, path: str, body: Any = None) -> Any:
    """The answer's JSON, or None when there was no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        return json.loads(answer) if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def batch(seq: int, rows: int = 10) -> dict[str, Any]:
    now = time.time()
    records = [
        RequestRecord(
            request_id=f"{seq}-{row}",
            source=Source.PLUGIN,
            outcome=Outcome.COMPLETED,
            finished_unix_seconds=now,
        )
        for row in range(rows)
    ]
    return encode_batch(records, sidecar_id="side", epoch=1, seq=seq)


def stored(port: int) -> tuple[int, int, int]:
    """Requests in the rows, in the error objective, and by the sidecar's own count."""
    answer = call(port, "GET", "/api/v1/overview")
    errors = next(b for b in answer["budgets"] if b["objective"] == "errors")
    return (
        sum(row["requests"] for row in answer["rows"]),
        errors["total"],
        sum(sidecar["records"] for sidecar in answer["sidecars"]),
    )


@pytest.mark.parametrize(
    ("moment", "duplicate"),
    [("during decode", False), ("before commit", False), ("after commit", True)],
)
def test_killed_between_receipt_and_answer(
    start: Callable[..., Process], moment: str, duplicate: bool
) -> None:
    sent = batch(1)
    doomed = start(moment)
    assert call(doomed.port, "POST", "/api/v1/records", sent) is None
    doomed.end()
    assert doomed.process.returncode == -signal.SIGKILL
    port = start().port
    answer = call(port, "POST", "/api/v1/records", sent)
    assert (answer["accepted"], answer["duplicate"]) == (10, duplicate)
    assert stored(port) == (10, 10, 10)


def test_killed_twice_under_load(start: Callable[..., Process]) -> None:
    running = start()
    port, batches = running.port, 150
    answered: list[int] = []
    draw = random.Random(11)

    def send(numbers: range) -> None:
        for seq in numbers:
            body = batch(seq)
            while call(port, "POST", "/api/v1/records", body) is None:
                time.sleep(0.02)
            answered.append(seq)

    senders = [threading.Thread(target=send, args=(range(n, batches, 3),)) for n in range(3)]
    for sender in senders:
        sender.start()
    for part in (1, 2):
        deadline = time.monotonic() + 60
        while len(answered) < batches * part // 3:
            assert time.monotonic() < deadline
            time.sleep(draw.uniform(0.001, 0.02))
        running.kill()
        running = start()
    for sender in senders:
        sender.join(60)
        assert not sender.is_alive()
    assert sorted(answered) == list(range(batches))
    assert stored(port) == (10 * batches,) * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_stores_what_it_took_and_says_nothing(
    start: Callable[..., Process], tmp_path: Path, number: signal.Signals
) -> None:
    running = start()
    assert call(running.port, "POST", "/api/v1/records", batch(1))["accepted"] == 10
    os.kill(running.process.pid, number)
    out, errors = running.end()
    assert errors == ""
    assert (running.process.returncode, out) == (0, "")
    assert not (tmp_path / "collector.duckdb.wal").exists()  # all of it is in the main file
    assert stored(start().port) == (10, 10, 10)

"""How many records a second one core of the collector takes, and how fast it answers then.

A collector in a process of its own, held to one core, its DuckDB file on disk; the sender on
another core posts batches that were encoded before the clock started, over loopback HTTP, on as
many connections as there would be sidecars, each waiting for its answer. Cost is the collector's
own CPU time: a shared machine disturbs it less than the wall clock. Nothing is claimed beyond the
sizes that are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import http.client
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil

from servoscope.alerts.spec import default_spec
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.wire import encode_batch

TYPES = ("chat", "summarise", "generate", "rag")
PLACE = b'"seq":0'
HEAD_INGEST = """\
| rows a batch | sidecars | body | records | bytes a record | records/s (wall) | records/s of CPU \
| CPU us a record |
|---|---|---|---|---|---|---|---|"""
HEAD_ASK = """\
| overview window, s | requests in it | questions | p50 ms | p99 ms |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Shape:
    """One way of sending."""

    rows: int
    gzip: bool
    sidecars: int


def records(count: int, now: float, seed: int) -> list[RequestRecord]:
    """Mixed requests of one server that ended within the same two seconds of the last hour."""
    draw = random.Random(seed)
    made = []
    flush = now - draw.uniform(0, 3600)
    for _ in range(count):
        prompt, output = int(draw.lognormvariate(6.5, 1.2)) + 1, int(draw.lognormvariate(5, 1)) + 1
        first, pace = draw.lognormvariate(-1.2, 0.8), draw.uniform(0.01, 0.08)
        whole = first + pace * (output - 1)
        end = flush - draw.uniform(0, 2)
        made.append(
            RequestRecord(
                request_id=f"chatcmpl-{draw.getrandbits(128):032x}",
                source=Source.PLUGIN,
                outcome=Outcome.COMPLETED if draw.random() < 0.98 else Outcome.ERROR,
                phase=Phase.DECODE,
                finish_reason="stop",
                status_code=200,
                engine="vllm",
                server=f"10.0.0.{seed}:8000",
                rank=0,
                model_name="meta-llama/Llama-3.1-8B-Instruct",
                model_version=draw.choice(["0e9e39f249a1", "8c22764a7e3d"]),
                gpu_model="NVIDIA H200",
                request_type=draw.choice(TYPES),
                streaming=draw.random() < 0.9,
                received_unix_seconds=end - whole,
                first_token_unix_seconds=end - whole + first,
                finished_unix_seconds=end,
                queue_seconds=first * 0.3,
                prefill_seconds=first * 0.7,
                decode_seconds=whole - first,
                time_to_first_token_seconds=first,
                time_per_output_token_seconds=pace if output > 1 else None,
                max_inter_token_seconds=pace * 3,
                e2e_seconds=whole,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=draw.randrange(prompt),
                preemptions=0,
            )
        )
    return made


def serve(path: str, port: int) -> None:
    """The child: one core, one database thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = CollectorConfig(port=port, database=Path(path), threads=1)
    objectives = default_spec().objectives
    asyncio.run(run_collector(config, objectives, on_ready=lambda url: print(url, flush=True)))


class Child:
    """The collector and what it has used so far."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the collector did not start")
        self.usage = psutil.Process(self.process.pid)
        self.host, _, self.port = url.removeprefix("http://").rpartition(":")

    def connect(self) -> http.client.HTTPConnection:
        """A connection of one sidecar."""
        return http.client.HTTPConnection(self.host, int(self.port), timeout=120)

    def cpu_seconds(self) -> float:
        """User and system time of the collector so far."""
        times = self.usage.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """End it and wait."""
        self.process.terminate()
        self.process.wait(60)


def call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    packed: bool = False,
) -> bytes:
    """The body of a good answer; a batch that finds no room is sent again."""
    headers = {"content-type": "application/json"} if body else {}
    if packed:
        headers["content-encoding"] = "gzip"
    while True:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200:
            return answer
        if response.status != 503:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:200]!r}")
        time.sleep(0.05)


def bodies(shape: Shape, count: int, start: int, now: float) -> list[bytes]:
    """``count`` batches with keys of their own, ready to send (rows repeat every 20 batches)."""
    templates = [
        orjson.dumps(
            encode_batch(records(shape.rows, now, seed), sidecar_id=f"bench-{seed}", epoch=1, seq=0)
        )
        for seed in range(min(20, count))
    ]
    made = []
    for number in range(count):
        body = templates[number % len(templates)]
        body = body.replace(PLACE, b'"seq":%d' % (start + number), 1)
        made.append(gzip.compress(body, 1) if shape.gzip else body)
    return made


def ingest(child: Child, shape: Shape, total: int, start: int) -> None:
    """Send ``total`` records and print what they cost."""
    ready = bodies(shape, total // shape.rows, start, time.time())
    waiting = iter(ready)

    def send() -> None:
        connection = child.connect()
        for body in waiting:  # shared: next() of a list's iterator is atomic
            call(connection, "POST", "/api/v1/records", body, packed=shape.gzip)
        connection.close()

    cpu, begin = child.cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(shape.sidecars) as senders:
        for sending in [senders.submit(send) for _ in range(shape.sidecars)]:
            sending.result()
    wall, cpu = time.perf_counter() - begin, child.cpu_seconds() - cpu
    sent = len(ready) * shape.rows
    size = sum(map(len, ready)) / sent
    print(
        f"| {shape.rows:,} | {shape.sidecars} | {'gzip' if shape.gzip else 'plain'} | {sent:,} "
        f"| {size:.0f} | {sent / wall:,.0f} | {sent / cpu:,.0f} | {cpu / sent * 1e6:.1f} |",
        flush=True,
    )


def ask(child: Child, window: int, times: int) -> None:
    """Ask for the overview ``times`` times and print how long it took."""
    seconds, requests, connection = [], 0, child.connect()
    for _ in range(times):
        begin = time.perf_counter()
        answer = orjson.loads(call(connection, "GET", f"/api/v1/overview?window_seconds={window}"))
        seconds.append(time.perf_counter() - begin)
        requests = sum(row["requests"] for row in answer["rows"])
    connection.close()
    p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1000
    print(f"| {window:,} | {requests:,} | {times} | {p50:.1f} | {p99:.1f} |", flush=True)


def main() -> int:
    """Run and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=200_000, help="a line of the first table")
    parser.add_argument("--questions", type=int, default=60, help="a line of the second table")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, 0)
        return 0
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "collector.duckdb"
        child = Child(path)
        os.sched_setaffinity(0, {cores[-1]})
        try:
            print(HEAD_INGEST)
            start = 0
            for shape, share in (
                (Shape(5000, gzip=False, sidecars=2), 1.0),
                (Shape(5000, gzip=True, sidecars=2), 1.0),
                (Shape(500, gzip=True, sidecars=8), 0.5),
                (Shape(50, gzip=True, sidecars=24), 0.1),
            ):
                total = max(shape.rows, int(args.records * share))
                ingest(child, shape, total, start)
                start += 1_000_000
            stored = child.usage.memory_info().rss / 2**20
            size = sum(p.stat().st_size for p in Path(folder).iterdir()) / 2**20
            print(f"\nfile {size:.0f} MiB, collector's resident memory {stored:.0f} MiB, "
                  f"{len(cores)} cores, load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
            print(HEAD_ASK)
            for window in (60, 900, 3600):
                ask(child, window, args.questions)
        finally:
            child.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

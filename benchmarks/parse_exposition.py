"""Reading an engine's /metrics: our parser against prometheus_client's, and a cycle once a second.

    python benchmarks/parse_exposition.py [--json] [--cycle-seconds 20]

Parsing: a vLLM exposition of 3,000 lines (the captured one, its ranks multiplied), as a sidecar
reads it, scrape after scrape. Both take the same texts in turn, each a copy made just before, as it
would come from a socket; ours is measured from the second scrape on; figures are medians of CPU
time of the thread, ratios are of medians. Once every number
moves from text to text, once they go back and forth between two real texts of one engine (idle and
under load, 45 % of the lines differ).

Cycle: one engine (724 lines, 60 kB, in a process of its own) read once a second over HTTP, parsed,
and put into the families that the sidecar publishes. CPU is user + system of this process over the
whole interval. The peer is the same read with prometheus_client's parser and nothing after it.
Where a virtual machine loses its memory and its turn in a second of sleep, all that wakes up costs
more. How much is printed beside it: the same cycles twenty a second, and a fixed piece of Python
(a dict of 3,000 numbers made and summed) after each of the same sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from servoscope.exporters.exposition import TextParser
from servoscope.exporters.vllm.parse import Parser
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.sources.scrape import fetch

LINES = 3_000
ROUNDS = 25
CAPTURES = Path(__file__).parent.parent / "tests/fixtures/engines/vllm/0.32.0"
LOADED = CAPTURES / "metrics_under_load.txt"
IDLE = CAPTURES / "metrics.txt"
_NUMBER = re.compile(r" ([0-9.e+-]+)$")
AWAKE_SECONDS = 0.05  # between two cycles: the machine does not go to sleep
_MAX_BYTES = 8 * 2**20


def exposition(captured: str, lines: int, scrape: int) -> str:
    """``captured`` with more ranks, and counters that have moved on by ``scrape``."""
    source = captured.splitlines()
    out = list(source)
    rank = 1
    while len(out) < lines:
        marked = [x.replace('engine="0"', f'engine="{rank}"') for x in source if 'engine="0"' in x]
        out += marked[: lines - len(out)]
        rank += 1
    if scrape:
        out = [
            x if x.startswith("#") else _NUMBER.sub(lambda m: f" {float(m[1]) + scrape}", x)
            for x in out
        ]
    return "\n".join(out) + "\n"


def client_families(text: str) -> object:
    return list(text_string_to_metric_families(text))


def cpu_seconds(read: Callable[[str], object], text: str) -> float:
    text = text.encode().decode()  # the last one is out of every cache after the peer's turn
    start = time.thread_time()
    read(text)
    return time.thread_time() - start


def medians(texts: Sequence[str]) -> dict[str, float]:
    """CPU milliseconds a text, by who reads it; the first text is not counted."""
    readers: dict[str, Callable[[str], object]] = {
        "client": client_families,
        "text": TextParser().parse,
        "sample": Parser("0.32.0").parse,
    }
    found: dict[str, list[float]] = {name: [] for name in readers}
    for body in texts:
        for name, read in readers.items():
            found[name].append(1e3 * cpu_seconds(read, body))
    out = {name: statistics.median(times[1:]) for name, times in found.items()}
    return out | {"first": found["text"][0]}


def parsing() -> dict[str, Any]:
    loaded, idle = (path.read_text(encoding="utf-8") for path in (LOADED, IDLE))
    moved = [exposition(loaded, LINES, scrape + 1) for scrape in range(ROUNDS + 1)]
    turns = [exposition(loaded if i % 2 else idle, LINES, 0) for i in range(ROUNDS + 1)]
    return {
        "lines": moved[0].count("\n"),
        "every number moved": medians(moved),
        "idle and loaded": medians(turns),
    }


def serve(bodies: Sequence[bytes], port: Connection) -> None:
    """The engine's side: answers with one text after the other until it is ended."""

    class Handler(BaseHTTPRequestHandler):
        count = 0
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            """One scrape."""
            Handler.count += 1
            body = bodies[Handler.count % len(bodies)]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


async def cycles(
    url: str, count: int, interval_seconds: float, take: Callable[[bytes], object]
) -> float:
    """CPU seconds a cycle of this process, at one cycle an interval."""
    async with aiohttp.ClientSession() as session:
        for warm_up in range(3):
            await once(session, url, take)
            await asyncio.sleep(0.1 * warm_up)
        start = time.process_time()
        for number in range(count):
            due = asyncio.get_running_loop().time() + interval_seconds
            await once(session, url, take)
            if number < count - 1:
                await asyncio.sleep(due - asyncio.get_running_loop().time())
        return (time.process_time() - start) / count


def fixed_work_seconds(count: int, interval_seconds: float) -> float:
    """CPU seconds of a piece of Python that is always the same, at one an interval; median."""
    found = []
    for _ in range(count):
        time.sleep(interval_seconds)
        start = time.process_time()
        made = {str(number): number * 2.0 for number in range(3_000)}
        sum(made.values())
        found.append(time.process_time() - start)
    return statistics.median(found)


async def once(session: aiohttp.ClientSession, url: str, take: Callable[[bytes], object]) -> None:
    found = await fetch(session, url, timeout_seconds=5.0, max_bytes=_MAX_BYTES)
    if found.text is None:
        raise RuntimeError(f"no answer: {found.detail}")
    take(found.text)


def cycle(seconds: int) -> dict[str, float]:
    loaded = LOADED.read_text(encoding="utf-8")
    bodies = [exposition(loaded, 0, scrape + 1).encode() for scrape in range(30)]
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=serve, args=(bodies, theirs), daemon=True
    )
    engine.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/metrics"
        parser = Parser("0.32.0")
        published = EngineMetrics(
            Registry(), Identity("vllm", url.split("/")[2], "tiny", "unknown", "none")
        )

        def ours_ms(interval: float) -> float:
            def take(text: bytes) -> object:
                return published.observe(parser.parse(text))

            return 1e3 * asyncio.run(cycles(url, seconds, interval, take))

        def client_ms(interval: float) -> float:
            def take(text: bytes) -> object:
                return client_families(text.decode())

            return 1e3 * asyncio.run(cycles(url, seconds, interval, take))

        found = {"seconds": float(seconds)}
        for interval, name in ((1.0, "once"), (AWAKE_SECONDS, "awake")):
            found[f"ours_{name}_ms"] = ours_ms(interval)
            found[f"client_{name}_ms"] = client_ms(interval)
            found[f"fixed_{name}_ms"] = 1e3 * fixed_work_seconds(seconds, interval)
    finally:
        engine.terminate()
        engine.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cycle-seconds", type=int, default=20)
    options = parser.parse_args()
    figures: dict[str, Any] = {"parsing": parsing(), "cycle": cycle(options.cycle_seconds)}
    if options.json:
        print(json.dumps(figures))
        return 0
    peer = f"prometheus_client {version('prometheus_client')}"
    for kind in ("every number moved", "idle and loaded"):
        found = figures["parsing"][kind]
        print(f"{figures['parsing']['lines']} lines, {kind}; CPU ms a text:")
        for label, name in (
            (f"{peer}, text_string_to_metric_families", "client"),
            ("ours, first scrape", "first"),
            ("ours, from the second scrape on", "text"),
            ("ours, text to vLLM's sample", "sample"),
        ):
            ratio = found["client"] / found[name]
            print(f"  {label:<52} {found[name]:8.2f}   {ratio:6.1f} x")
    found = figures["cycle"]
    print(f"one engine, {found['seconds']:.0f} cycles; CPU ms a cycle, share of one core at 1 Hz:")
    for pace, name in (("once a second", "once"), ("20 a second", "awake")):
        for label, who in (
            ("ours: read, parse, publish", "ours"),
            (f"{peer}: read, parse", "client"),
            ("fixed piece of Python", "fixed"),
        ):
            each = found[f"{who}_{name}_ms"]
            print(f"  {f'{label}, {pace}':<58} {each:8.2f}   {each / 10:6.2f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

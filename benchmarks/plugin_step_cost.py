"""What the vLLM plug-in costs: microseconds a step, a token, a request and a message of HTTP.

    python benchmarks/plugin_step_cost.py            microbenchmarks only (seconds)
    python benchmarks/plugin_step_cost.py --engine   and a real vLLM on the CPU (minutes)

The microbenchmark runs the plug-in around stand-ins that do nothing, so all that is measured is
ours: CPU time of this thread, median over blocks. The claim for an engine is (our CPU
microseconds a step) / (its step's milliseconds); both are printed.

The on/off comparison switches the plug-in off and on inside ONE running engine (``bypass`` on
both sockets) in ABBA blocks of the same closed load, so that drift of the machine hits both
sides alike. Printed is the median over ABBA groups of on/off - 1 of the output tokens a second,
with a bootstrap interval; nothing beyond that interval is claimed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from engines.vllm_cpu import VllmServer
from exporters.vllm import fakes
from servoscope.exporters.knobs.client import KnobClient, find_knob_sockets
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.plugin.lines import LineDecoder, encode_line
from servoscope.exporters.plugin.record_buffer import RecordBuffer
from servoscope.exporters.plugin.sockets import connect
from servoscope.exporters.vllm.hooks import Hooks, install
from servoscope.exporters.vllm.http_exchange import watch_http
from servoscope.exporters.vllm.lifecycle import Lifecycle
from servoscope.exporters.vllm.requests import find_stats_sockets
from servoscope.exporters.vllm.scheduler import steered
from servoscope.lab.client import PlannedRequest, run_closed

ROUNDS = 20_000
BLOCKS = 15


def cpu_microseconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median CPU microseconds of one call, over blocks."""
    blocks = []
    for _ in range(BLOCKS):
        began = time.thread_time_ns()
        for _ in range(rounds // BLOCKS):
            work()
        blocks.append((time.thread_time_ns() - began) / (rounds // BLOCKS) / 1e3)
    return statistics.median(blocks)


class IdleScheduler(fakes.Scheduler):
    """schedule() that costs nothing."""

    output = SimpleNamespace(total_num_scheduled_tokens=64)

    def schedule(self, *_args: Any, **_kwargs: Any) -> Any:
        """Nothing but the answer."""
        return self.output


def step_cost() -> dict[str, float]:
    """Added microseconds of one schedule(): untouched, with a knob turned, and bypassed."""
    plain = IdleScheduler(fakes.vllm_config())
    bare = cpu_microseconds(plain.schedule)
    pilots: list[Any] = []
    scheduler = steered(IdleScheduler, pilots.append)(fakes.vllm_config())
    scheduler.running = [None] * 64
    (pilot,) = pilots
    untouched = cpu_microseconds(scheduler.schedule) - bare
    pilot.law.lease("benchmark", 30, time.monotonic())
    pilot.law.set("benchmark", {"chunk_tokens": 256}, time.monotonic(), 0)
    turned = cpu_microseconds(scheduler.schedule) - bare
    pilot.law.renew("benchmark", time.monotonic())
    pilot.law.bypass("benchmark", True, time.monotonic())
    bypassed = cpu_microseconds(scheduler.schedule) - bare
    return {"untouched": untouched, "knob turned": turned, "bypassed": bypassed}


def request_cost() -> dict[str, float]:
    """Added microseconds in the API server: for each output of a request, and for a request."""

    def classes(*, hooked: bool) -> tuple[Any, Any]:
        processor, stats, llm = fakes.fresh_classes()
        if hooked:
            buffer = RecordBuffer()
            install(Hooks(), Lifecycle(buffer.put), processor, stats, llm)
        return processor(), stats()

    def one_output(stats: Any) -> Callable[[], object]:
        seen = fakes.RequestStateStats(last_token_ts=1.0)
        output = SimpleNamespace(new_token_ids=[0], events=None)
        return lambda: stats.update_from_output(output, 2.0, False, seen, None, None)

    def one_request(processor: Any, stats: Any) -> Callable[[], object]:
        request = fakes.EngineCoreRequest("i", "cmpl-x-0", 100.0)

        def run() -> None:
            processor.add_request(request)
            processor.process("i", 1, 1.0, stats, finish=fakes.FinishReason.STOP)

        return run

    off, on = classes(hooked=False), classes(hooked=True)
    return {
        "output of a request": cpu_microseconds(one_output(on[1]))
        - cpu_microseconds(one_output(off[1])),
        "request, registration to record": cpu_microseconds(one_request(*on))
        - cpu_microseconds(one_request(*off)),
    }


def http_cost() -> dict[str, float]:
    """Added microseconds of one POST (10 headers, body in one message), and of a message of its
    answer: 1,000 are sent after the first, and each passes one look of ours."""
    headers = [(f"header-{n}".encode(), b"value") for n in range(8)]
    headers += [(b"x-request-type", b"rag"), (b"x-tenant", b"acme")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    body = {"type": "http.request", "body": b"", "more_body": False}
    chunk = {"type": "http.response.body", "body": b"data", "more_body": True}

    async def receive() -> Any:
        return body

    async def send(_message: Any) -> None:
        pass

    def application(messages: int, *, watched: bool) -> Any:
        class Application:
            async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
                await receive()
                for _ in range(messages):
                    await send(chunk)

        if watched:
            modules: Any = {"fastapi": SimpleNamespace(FastAPI=Application)}
            watch_http(Hooks(), modules)
        return Application()

    def one(app: Any) -> Callable[[], None]:
        def run() -> None:
            with contextlib.suppress(StopIteration):  # nothing in it waits: no loop is needed
                app(scope, receive, send).send(None)

        return run

    def added(messages: int, rounds: int) -> float:
        on, off = (application(messages, watched=watched) for watched in (True, False))
        return cpu_microseconds(one(on), rounds) - cpu_microseconds(one(off), rounds)

    post = added(0, ROUNDS)
    return {"HTTP POST": post, "message of its answer": (added(1000, ROUNDS // 100) - post) / 1000}


class BypassSwitch:
    """Both sockets of one engine; off means our code returns at once everywhere."""

    def __init__(self, server: VllmServer) -> None:
        (stats,) = find_stats_sockets([server.run_dir], server.pids())
        self._stats = connect(stats)
        self._stats.settimeout(10)
        self._decoder = LineDecoder()
        self._knobs_path = find_knob_sockets([server.run_dir], server.pids())[0]
        self._knobs: KnobClient | None = None
        self._ask({"op": "subscribe"}, "subscribed")

    async def turn(self, *, on: bool) -> KnobState:
        """Plug-in on or off; returns the scheduler's counters at this moment."""
        if self._knobs is None:
            self._knobs = await KnobClient.connect(self._knobs_path)
        await self._knobs.lease("plugin_step_cost")
        await self._knobs.bypass(not on)
        self._ask({"op": "bypass", "on": not on}, "status")
        return await self._knobs.get()

    async def renew(self) -> None:
        """Hold the lease, and acknowledge the records as a sidecar does."""
        while True:
            await asyncio.sleep(5)
            if self._knobs is not None:
                await self._knobs.renew()

    def _ask(self, message: dict[str, Any], wanted: str) -> None:
        self._stats.send(encode_line(message))
        while True:
            for answer in self._decoder.feed(self._stats.recv(1 << 20)):
                if answer.get("type") == "record":
                    self._stats.send(encode_line({"op": "ack", "seq": answer["seq"]}))
                elif answer.get("type") == wanted:
                    return


async def block(server: VllmServer, tag: str, requests: int, concurrency: int) -> float:
    """Output tokens a second of one block."""
    plan = [
        PlannedRequest(
            request_id=f"{tag}-{n}", prompt=f"# {tag} {n}\n" * 8, max_tokens=64, streaming=True
        )
        for n in range(requests)
    ]
    began = time.perf_counter()
    observed = await run_closed(server.url, plan, concurrency)
    return sum(s.output_tokens or 0 for s in observed) / (time.perf_counter() - began)


async def compare(server: VllmServer, groups: int, requests: int, concurrency: int) -> None:
    """ABBA blocks; prints the table."""
    switch = BypassSwitch(server)
    renewing = asyncio.create_task(switch.renew())
    await block(server, "warm", requests, concurrency)
    ratios, steps = [], []
    for group in range(groups):
        seen: dict[bool, list[float]] = {True: [], False: []}
        for place, on in enumerate((True, False, False, True)):
            before = await switch.turn(on=on)
            began = time.perf_counter()
            seen[on].append(await block(server, f"g{group}{place}", requests, concurrency))
            took = time.perf_counter() - began
            after = await switch.turn(on=on)
            if on and after.steps > before.steps:
                count = after.steps - before.steps
                ours = after.plugin_cpu_seconds - before.plugin_cpu_seconds
                theirs = after.scheduler_cpu_seconds - before.scheduler_cpu_seconds
                steps.append((took / count, ours / count, theirs / count))
        ratios.append(statistics.fmean(seen[True]) / statistics.fmean(seen[False]) - 1)
    renewing.cancel()
    await switch.turn(on=True)
    step, ours, theirs = (statistics.median(column) for column in zip(*steps, strict=True))
    low, high = bootstrap(ratios)
    print("\n| in a running engine (64 slots, CPU) | value |\n|---|---|")
    print(f"| step, wall | {step * 1e3:.2f} ms |")
    print(f"| schedule(), CPU | {theirs * 1e6:.1f} us |")
    print(f"| plug-in in the engine core, CPU a step | {ours * 1e6:.1f} us |")
    print(f"| plug-in CPU / step | {ours / step:.3%} |")
    print(
        f"| output tokens a second, on against off: median of {groups} ABBA groups |"
        f" {statistics.median(ratios):+.2%} (95 % bootstrap {low:+.2%} .. {high:+.2%}) |"
    )


def bootstrap(values: Sequence[float], rounds: int = 5000) -> tuple[float, float]:
    """95 % interval of the median."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(values, k=len(values))) for _ in range(rounds)
    )
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also start a real vLLM on the CPU (about 5 minutes)",
    )
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    print("| added by the plug-in, CPU us | median |\n|---|---|")
    for name, value in step_cost().items():
        print(f"| a step, {name} | {value:.2f} |")
    for name, value in {**request_cost(), **http_cost()}.items():
        print(f"| {'an' if name[0] in 'aeiou' else 'a'} {name} | {value:.2f} |")
    if options.engine:
        with VllmServer(knobs=True, env={"SERVOSCOPE_BENCH": "1"}) as server:
            asyncio.run(compare(server, options.groups, options.requests, options.concurrency))


if __name__ == "__main__":
    main()

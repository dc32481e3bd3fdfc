"""A restart of the engine is seen, counted once, and attached to again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from engines.background import background
from servoscope.sidecar.attach.processes import ServerProcess
from servoscope.sidecar.attach.target import AttachError, Target
from servoscope.sidecar.attach.watch import EngineWatch

PROCESS = ServerProcess(1, "api", 100.0, ("vllm",), 0, 100.0)
TARGET = Target(
    url="http://127.0.0.1:1", host="127.0.0.1", port=1, server="127.0.0.1:1", engine="vllm",
    version="1", model_name="m", model_version="v", pids={1: "api"}, processes=(PROCESS,),
)  # fmt: skip
AGAIN = replace(
    TARGET, processes=(replace(PROCESS, pid=2, start_unix_seconds=200.0, start_seconds=200.0),)
)
UNSEEN = replace(TARGET, processes=(), pids={})


class Bench:
    """An engine whose process can die and come back."""

    def __init__(self, target: Target = TARGET) -> None:
        self.runs = True
        self.answers: list[Target | None] = []
        self.told: list[Target] = []
        self.watch = EngineWatch(
            target, self._attach, self._restarted, interval_seconds=0.001,
            runs=lambda _target: self.runs,
        )  # fmt: skip

    async def _attach(self) -> Target:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if found is None:
            raise AttachError("still loading")
        return found

    async def _restarted(self, target: Target) -> None:
        self.told.append(target)
        self.runs = True

    async def run_until(self, done: Callable[[], bool]) -> None:
        async with background(self.watch.run()):
            async with asyncio.timeout(5):
                while not done():  # noqa: ASYNC110 - whatever the test waits for
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)


async def test_a_restart_is_counted_once() -> None:
    bench = Bench()
    bench.runs = False
    bench.answers = [None, None, AGAIN]
    await bench.run_until(lambda: bool(bench.told))
    assert bench.watch.restarts == 1
    assert bench.watch.target is AGAIN
    assert bench.told == [AGAIN]


async def test_an_engine_that_is_gone_is_no_restart() -> None:
    bench = Bench()
    bench.runs = False
    bench.answers = [None]
    await bench.run_until(lambda: not bench.watch.alive)
    assert bench.watch.restarts == 0


async def test_the_same_process_is_no_restart() -> None:
    bench = Bench()
    bench.runs = False
    bench.answers = [TARGET]
    await bench.run_until(lambda: True)
    assert bench.watch.restarts == 0


async def test_it_waits_until_the_new_process_can_be_seen() -> None:
    bench = Bench()
    bench.runs = False
    bench.answers = [UNSEEN, UNSEEN, AGAIN]
    await bench.run_until(lambda: bool(bench.told))
    assert bench.told == [AGAIN]


async def test_counters_at_zero_tell_of_a_restart_where_processes_cannot_be_seen() -> None:
    bench = Bench(UNSEEN)
    bench.answers = [None, UNSEEN]
    bench.watch.reset_seen()
    await bench.run_until(lambda: bool(bench.told))
    assert bench.watch.restarts == 1

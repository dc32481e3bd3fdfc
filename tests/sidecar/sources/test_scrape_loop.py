"""The whole way from an engine's /metrics to our families, with an engine that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from engines.background import background
from servoscope.exporters.records import EngineSample, SourceState
from servoscope.sidecar.attach.processes import ServerProcess
from servoscope.sidecar.attach.target import attach
from servoscope.sidecar.config import SidecarConfig
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.sources.scrape_loop import ScrapeLoop

CONFIG = SidecarConfig(
    scrape_interval_seconds=0.05, scrape_timeout_seconds=0.3, scrape_max_bytes=200_000
)
TOKENS = "engine_generated_tokens_total"


class Bench:
    """A loop that is turned by hand."""

    def __init__(self, session: aiohttp.ClientSession, target: Any) -> None:
        self.now, self.steady = 1000.0, 10.0
        self.resets = 0
        self.afters = 0
        self.registry = Registry()
        identity = Identity("vllm", target.server, "tiny", "v", "none")
        self.metrics = EngineMetrics(self.registry, identity)
        self.target = target
        self.loop = ScrapeLoop(
            session, CONFIG, target, self.metrics,
            on_reset=self._reset, after=self._after, clock=lambda: self.now,
            steady=lambda: self.steady,
        )  # fmt: skip

    def _reset(self) -> None:
        self.resets += 1

    async def _after(self) -> None:
        self.afters += 1

    def value(self, name: str) -> float:
        return sum(self.registry.family(name).values().values())

    def state(self) -> SourceState:
        return self.loop.status(self.steady).state


@pytest.fixture
async def bench(engine: Any) -> AsyncIterator[Bench]:
    target = await attach(engine.url)
    unseen = replace(target, processes=(), pids={})  # as on another host
    async with aiohttp.ClientSession() as session:
        yield Bench(session, unseen)


@pytest.mark.parametrize(
    ("mode", "state", "reason"),
    [
        ("500", SourceState.FAILED, "http_500"),
        ("huge", SourceState.FAILED, "too_large"),
        ("slow", SourceState.FAILED, "timeout"),
        ("vanish", SourceState.FAILED, "connection"),
        ("garbage", SourceState.BAD_VALUE, "bad_value"),
        ("nan", SourceState.BAD_VALUE, "bad_value"),
    ],
)
async def test_a_fault_has_its_state_and_reason_and_goes_away(
    bench: Bench, engine: Any, mode: str, state: SourceState, reason: str
) -> None:
    await bench.loop.once()
    assert bench.state() is SourceState.IDLE
    engine.mode = mode
    await bench.loop.once()
    assert bench.state() is state
    assert bench.loop.state.errors[reason] == 1
    assert bench.value(TOKENS) == 50.0  # counters stay where they were
    engine.mode, engine.generated_tokens = "good", 60.0
    await bench.loop.once()
    assert bench.state() is SourceState.OK
    assert bench.value(TOKENS) == 60.0


async def test_bytes_that_are_no_text_are_a_bad_value_and_the_rest_is_read(
    bench: Bench, engine: Any
) -> None:
    good = engine.metrics()
    engine.mode = "bytes"
    engine.body = good.encode() + b'vllm:other{model_name="\xff"} 1\n'
    await bench.loop.once()
    assert bench.state() is SourceState.BAD_VALUE
    assert "not UTF-8" in bench.loop.status(bench.steady).detail
    assert bench.loop.refused["text"] == 1
    assert bench.value(TOKENS) == 50.0
    engine.mode = "good"
    await bench.loop.once()
    assert bench.state() is SourceState.IDLE


@pytest.mark.parametrize("large", [False, True])
async def test_a_text_that_is_dear_to_parse_is_read_less_often(
    bench: Bench, engine: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.loop._config = replace(CONFIG, scrape_max_bytes=10_000_000, scrape_timeout_seconds=5.0)
    small, parse = engine.metrics(), bench.loop._parser.parse
    if large:  # parsed in a thread
        engine.metrics = lambda: small + "# a comment\n" * 50_000

    def dear(text: str | bytes) -> EngineSample:
        bench.steady += 2.0
        return parse(text)

    monkeypatch.setattr(bench.loop._parser, "parse", dear)
    await bench.loop.once()
    assert bench.loop.state.next_interval() >= 2.0 / CONFIG.scrape_cost_ratio
    assert (bench.loop.status(bench.steady).read_seconds or 0.0) >= 2.0


async def test_an_empty_answer_becomes_stale_not_idle(bench: Bench, engine: Any) -> None:
    await bench.loop.once()
    engine.mode = "empty"
    bench.now += 3600.0  # the wall clock is set: nothing is old by that
    await bench.loop.once()
    assert bench.state() is SourceState.IDLE
    bench.now -= 7200.0
    bench.steady += 1.0
    assert bench.state() is SourceState.STALE


async def test_a_nan_costs_only_its_own_value(bench: Bench, engine: Any) -> None:
    engine.mode = "nan"
    await bench.loop.once()
    assert bench.loop.refused["vllm:num_requests_running"] == 1
    assert bench.value("kv_usage_ratio") == 0.25
    assert len(bench.registry.family("running")) == 0


async def test_counters_that_start_again_are_a_restart_where_processes_are_unseen(
    bench: Bench, engine: Any
) -> None:
    await bench.loop.once()
    engine.restart_counters()
    engine.generated_tokens = 5.0
    await bench.loop.once()
    assert bench.resets == 1
    assert bench.value(TOKENS) == 55.0
    await bench.loop.once()
    assert bench.resets == 1


async def test_a_fall_in_the_same_process_is_a_refused_value(bench: Bench, engine: Any) -> None:
    process = ServerProcess(1, "api", 5.0, (), 0, 5.0)
    bench.loop.retarget(replace(bench.target, processes=(process,)))
    await bench.loop.once()
    engine.generated_tokens -= 1
    await bench.loop.once()
    assert (bench.resets, bench.loop.refused[TOKENS]) == (0, 1)
    assert bench.value(TOKENS) == 50.0


async def test_requests_are_counted_since_attach(bench: Bench, engine: Any) -> None:
    await bench.loop.once()
    engine.stopped += 4
    bench.now += 1
    await bench.loop.once()
    assert bench.loop.finished == 4
    assert bench.loop.counted_until == bench.now
    assert bench.loop.counts_requests


async def test_an_engine_that_goes_and_comes_back(bench: Bench, engine: Any) -> None:
    port = engine.port
    await bench.loop.once()
    await engine.stop()
    async with asyncio.timeout(10):
        while bench.state() is not SourceState.FAILED:
            await bench.loop.once()
    assert bench.loop.state.up in (True, False)
    assert len(bench.registry.family("running")) == 0
    await engine.start(port)
    async with asyncio.timeout(10):
        while bench.state() is SourceState.FAILED:
            await bench.loop.once()
    assert bench.value(TOKENS) == 50.0


async def test_it_runs_by_itself_and_can_be_woken(bench: Bench, engine: Any) -> None:
    async with background(bench.loop.run()):
        await _until(lambda: bench.afters >= 3)
    assert engine.hits["/metrics"] >= 3


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0.01)


async def test_a_large_text_is_read_too(bench: Bench, engine: Any) -> None:
    bench.loop._config = replace(CONFIG, scrape_max_bytes=10_000_000, scrape_timeout_seconds=5.0)
    small = engine.metrics()
    engine.metrics = lambda: small + "# a comment\n" * 50_000
    await bench.loop.once()
    assert bench.value(TOKENS) == 50.0

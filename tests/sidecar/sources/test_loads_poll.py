"""SGLang's load in the engine gauges: fresher than /metrics while it answers, else not there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from servoscope.exporters.records import EngineSample, Reading, Source, SourceState
from servoscope.exporters.sglang.settings import Settings
from servoscope.sidecar.attach.target import Target
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.sources.loads import LoadsPoll

IDENTITY = Identity("sglang", "127.0.0.1:1", "m", "v", "none")
KEY = ("sglang", "127.0.0.1:1", "m", "v", "none")
PATH = "/v1/loads?include=core"


def report(*, running: Any = 3, waiting: Any = 2, usage: Any = 0.5, age: float = 0.0) -> Any:
    at = datetime.now(UTC)
    return {
        "timestamp": at.isoformat(), "version": "0.5.23",
        "loads": [{
            "dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting,
            "token_usage": usage, "timestamp": at.timestamp() - age,
        }],
    }  # fmt: skip


def scraped(running: float) -> EngineSample:
    return EngineSample(engine="sglang", version=None, readings=(Reading("running", running),))


class Bench:
    def __init__(self, engine: Any, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.registry = Registry()
        self.metrics = EngineMetrics(self.registry, IDENTITY)
        target = Target(
            url=engine.url, host="127.0.0.1", port=engine.port, server="127.0.0.1:1",
            engine="sglang", version="0.5.23", model_name="m", model_version="v",
        )  # fmt: skip
        self.poll = LoadsPoll(
            session, lambda: target, self.metrics, interval_seconds=1.0, timeout_seconds=2.0,
            settings=lambda: Settings(decode_log_interval=7), steady=lambda: 100.0,
        )  # fmt: skip

    async def ask(self, told: Any) -> None:
        self.engine.paths[PATH] = told
        await self.poll.once()

    def gauge(self, name: str) -> float | None:
        return self.registry.family(name).get(KEY)

    def state(self) -> tuple[SourceState, str]:
        status = self.poll.status(100.0)
        assert status.source is Source.LOADS
        return status.state, status.detail


@pytest_asyncio.fixture
async def bench(engine: Any) -> AsyncIterator[Bench]:
    async with aiohttp.ClientSession(trust_env=False) as session:
        yield Bench(engine, session)


async def test_its_gauges_stand_before_those_of_metrics_while_it_answers(bench: Bench) -> None:
    bench.metrics.observe(scraped(40))
    assert bench.gauge("running") == 40
    await bench.ask(report())
    assert [bench.gauge(n) for n in ("running", "waiting", "kv_usage_ratio")] == [3, 2, 0.5]
    assert bench.state() == (SourceState.OK, "")
    bench.metrics.observe(scraped(40))  # as it was when the scheduler last logged
    assert bench.gauge("running") == 3
    bench.metrics.gone()  # /metrics fails, the load report does not
    assert bench.gauge("running") == 3
    await bench.ask(report(running=0, waiting=0, usage=0.0))
    assert bench.state()[0] is SourceState.IDLE
    assert bench.gauge("running") == 0


async def test_when_it_fails_its_gauges_end_and_metrics_tell_again(bench: Bench) -> None:
    await bench.ask(report())
    await bench.engine.stop()
    await bench.poll.once()
    assert bench.gauge("running") is None
    state, detail = bench.state()
    assert state is SourceState.FAILED
    assert "once in 7 decode steps" in detail
    assert "stand still while it idles" in detail
    bench.metrics.observe(scraped(40))
    assert bench.gauge("running") == 40
    assert bench.poll.errors["refused"] == 1


async def test_a_version_without_it_has_it_off(bench: Bench) -> None:
    await bench.ask(None)
    state, detail = bench.state()
    assert state is SourceState.OFF
    assert "0.5.9" in detail


async def test_an_old_snapshot_of_work_in_hand_is_no_reading(bench: Bench) -> None:
    await bench.ask(report())
    await bench.ask(report(age=30))
    state, detail = bench.state()
    assert state is SourceState.FAILED
    assert "stands still" in detail
    assert bench.gauge("running") is None
    await bench.ask(report(running=0, waiting=0, age=3_000))
    assert bench.state()[0] is SourceState.IDLE


async def test_garbage_and_bad_values_are_told_apart(bench: Bench) -> None:
    await bench.ask({"loads": 5})
    assert bench.state()[0] is SourceState.FAILED
    assert bench.poll.errors["garbage"] == 1
    await bench.ask(report(running=-4))
    state, detail = bench.state()
    assert state is SourceState.BAD_VALUE
    assert "num_running_reqs" in detail
    assert bench.poll.refused == {"num_running_reqs": 1}
    assert bench.gauge("waiting") == 2
    assert bench.gauge("running") is None


async def test_it_grows_stale(bench: Bench) -> None:
    await bench.ask(report())
    assert bench.poll.status(104.0).state is SourceState.STALE


@pytest.mark.parametrize("told", [json.loads("[]"), "x", 5])
async def test_other_json_is_an_error(bench: Bench, told: Any) -> None:
    await bench.ask(told)
    assert bench.state()[0] is SourceState.FAILED

"""llama.cpp's slots in the engine gauges, and the reasons not to ask for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from servoscope.exporters.llamacpp.settings import Settings
from servoscope.exporters.records import EngineSample, Reading, Source, SourceState
from servoscope.sidecar.attach.processes import ServerProcess
from servoscope.sidecar.attach.target import Target
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.sources.slots import SlotsPoll

IDENTITY = Identity("llamacpp", "127.0.0.1:1", "m", "v", "none")
KEY = ("llamacpp", "127.0.0.1:1", "m", "v", "none")
CANARY = "CANARY7719"
AWAKE, ASLEEP = ({"total_slots": 2, "is_sleeping": told} for told in (False, True))


def slot(*, busy: Any = True, held: Any = 512, **more: Any) -> Any:
    return {"id": 0, "n_ctx": 1024, "is_processing": busy, "n_prompt_tokens": held, **more}


def scraped(running: float) -> EngineSample:
    return EngineSample(engine="llamacpp", version=None, readings=(Reading("running", running),))


class Bench:
    def __init__(self, engine: Any, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.registry = Registry()
        self.metrics = EngineMetrics(self.registry, IDENTITY)
        self.settings = Settings(unified=False, sleeps=False)
        self.busy = False
        self.target = Target(
            url=engine.url, host="127.0.0.1", port=engine.port, server="127.0.0.1:1",
            engine="llamacpp", version=None, model_name="m", model_version="v",
        )  # fmt: skip
        self.poll = SlotsPoll(
            session, lambda: self.target, self.metrics, interval_seconds=1.0, timeout_seconds=2.0,
            settings=lambda: self.settings, busy=lambda: self.busy, steady=lambda: 100.0,
        )  # fmt: skip

    def restarted(self, pid: int) -> None:
        life = ServerProcess(pid, "server", 1.0, (), 0, float(pid))
        self.target = replace(self.target, processes=(life,))

    async def ask(self, *slots: Any) -> None:
        self.engine.paths["/slots"] = list(slots)
        await self.poll.once()

    def asked(self, path: str = "/slots") -> int:
        return int(self.engine.hits.get(path, 0))

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


async def test_its_gauges_stand_before_those_of_metrics_and_waiting_stays_theirs(
    bench: Bench,
) -> None:
    both = (Reading("running", 9.0), Reading("waiting", 3.0))
    bench.metrics.observe(replace(scraped(9), readings=both))
    await bench.ask(slot(), slot(busy=False, held=900))
    assert [bench.gauge(n) for n in ("running", "waiting", "kv_usage_ratio")] == [1, 3, 0.25]
    assert bench.state() == (SourceState.OK, "1 of 2 slots of 1024 tokens work")
    bench.metrics.observe(scraped(9))
    assert bench.gauge("running") == 1
    await bench.ask(slot(busy=False), slot(busy=False))
    assert bench.state() == (SourceState.IDLE, "0 of 2 slots of 1024 tokens work")
    assert bench.gauge("kv_usage_ratio") == 0
    assert bench.asked("/props") == 0


async def test_what_it_cannot_see_is_said(bench: Bench) -> None:
    await bench.ask(slot())
    assert any("wait for a slot" in what for what in bench.poll.status(100.0).blind_to)
    assert not any("KV cache" in what for what in bench.poll.status(100.0).blind_to)
    bench.settings = Settings(sleeps=False)
    await bench.ask(slot(), slot())
    assert bench.gauge("running") == 2
    assert any("KV cache" in what for what in bench.poll.status(100.0).blind_to)


@pytest.mark.parametrize(
    ("status", "why"),
    [(501, "--no-slots"), (404, "has no /slots"), (401, "wants a key"), (403, "wants a key")],
)
async def test_slots_that_are_off_are_a_state_and_no_error(
    bench: Bench, status: int, why: str
) -> None:
    await bench.ask(slot())
    bench.engine.statuses["/slots"] = status
    await bench.poll.once()
    state, detail = bench.state()
    assert state is SourceState.OFF
    assert why in detail
    assert "running comes from /metrics" in detail
    assert not bench.poll.errors
    assert bench.gauge("running") is None
    bench.metrics.observe(scraped(7))
    assert bench.gauge("running") == 7
    del bench.engine.statuses["/slots"]
    await bench.poll.once()
    assert bench.state()[0] is SourceState.OK


async def test_a_server_that_fails_is_a_failure(bench: Bench) -> None:
    bench.engine.statuses["/slots"] = 503
    await bench.poll.once()
    assert bench.state()[0] is SourceState.FAILED
    assert bench.poll.errors["http_503"] == 1
    bench.engine.statuses.clear()
    await bench.ask()
    state, detail = bench.state()
    assert state is SourceState.FAILED
    assert "no JSON list of slots" in detail
    await bench.engine.stop()
    await bench.poll.once()
    assert bench.poll.errors == {"http_503": 1, "garbage": 1, "refused": 1}


async def test_a_bad_value_is_refused_by_name_whatever_the_slot(bench: Bench) -> None:
    await bench.ask(slot(held=-1), slot(held=5000), [])
    state, detail = bench.state()
    assert state is SourceState.BAD_VALUE
    assert "slots[0].n_prompt_tokens" in detail
    assert bench.poll.refused == {"n_prompt_tokens": 2, "slots": 1}


async def test_what_people_wrote_is_not_kept_and_not_asked_for_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bench.restarted(1)
    await bench.ask(slot(prompt=f"{CANARY} text", generated=CANARY))
    for _ in range(3):
        await bench.poll.once()
    assert bench.asked() == 1
    state, detail = bench.state()
    assert state is SourceState.OFF
    assert "carries what people wrote" in detail
    assert bench.gauge("running") is None
    shown = (caplog.text, repr(vars(bench.poll)), bench.registry.render(openmetrics=False), detail)
    assert not any(CANARY in text for text in shown)
    bench.restarted(2)  # another life of the engine: maybe without
    await bench.ask(slot())
    assert bench.state()[0] is SourceState.OK


async def test_garbage_with_text_in_it_shows_none_of_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for told in (f"{CANARY} a", [f"{CANARY} b"], [slot(busy=CANARY, held=CANARY)]):
        bench.engine.paths["/slots"] = told
        await bench.poll.once()
        assert CANARY not in bench.state()[1] + caplog.text + repr(bench.poll.refused)


async def test_a_server_that_sleeps_is_not_woken(bench: Bench) -> None:
    bench.settings = Settings(unified=False, sleeps=True)
    bench.busy = True
    bench.engine.paths["/props"] = ASLEEP
    await bench.ask(slot())
    assert (bench.asked(), bench.asked("/props")) == (0, 1)
    state, detail = bench.state()
    assert state is SourceState.IDLE
    assert "would wake it" in detail


async def test_sleep_is_not_put_off_while_nothing_is_to_be_seen(bench: Bench) -> None:
    bench.settings = Settings(unified=False, sleeps=True)
    bench.engine.paths["/props"] = AWAKE
    await bench.ask(slot())
    assert bench.asked() == 0
    assert "only while /metrics shows work" in bench.state()[1]
    bench.busy = True
    await bench.poll.once()
    assert bench.asked() == 1
    assert bench.state()[0] is SourceState.OK


@pytest.mark.parametrize(
    ("props", "asked"),
    [
        ({"total_slots": 2}, 1),  # this build cannot sleep
        (AWAKE, 0),
        ({"no": "props"}, 0),
        (None, 0),  # 404
    ],
)
async def test_where_nobody_knows_whether_it_sleeps_no_harm_is_done(
    bench: Bench, props: Any, asked: int
) -> None:
    bench.settings = Settings(unified=False)
    bench.engine.paths["/props"] = props
    await bench.ask(slot())
    assert bench.asked() == asked


async def test_it_grows_stale(bench: Bench) -> None:
    await bench.ask(slot())
    assert bench.poll.status(104.0).state is SourceState.STALE

"""A whole sidecar on a llama.cpp whose /slots carry prompts: nothing of them comes out.

A service that looks like a llama.cpp stands in for the engine; the text is one that nobody may
find again: not on /metrics, not in inspect, in no log line, in no file of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.background import background
from servoscope.alerts.spec import default_spec
from servoscope.sidecar.api import inspection
from servoscope.sidecar.attach.target import attach
from servoscope.sidecar.config import SidecarConfig
from servoscope.sidecar.service import Sidecar

CANARY = "CANARY3906"
METRICS = b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n"


def slot(**more: Any) -> Any:
    return {"id": 0, "n_ctx": 1024, "is_processing": True, "n_prompt_tokens": 512, **more}


def like_llamacpp(engine: Any) -> None:
    engine.mode, engine.body = "bytes", METRICS
    engine.paths = {
        "/version": None,
        "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]},
        "/props": {"total_slots": 2, "build_info": "b11549-abc", "chat_template": CANARY,
                   "default_generation_settings": {"n_ctx": 1024}},
        "/slots": [slot(), slot(is_processing=False)],
    }  # fmt: skip


@asynccontextmanager
async def running(engine: Any) -> AsyncIterator[tuple[Sidecar, aiohttp.ClientSession]]:
    config = SidecarConfig(
        port=0, scrape_interval_seconds=0.05, tap="off", collector_url="",
        loads_interval_seconds=0.05, warmup_seconds=0.0,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        sidecar = Sidecar(await attach(engine.url), config, default_spec().objectives, session)
        task = await stack.enter_async_context(background(sidecar.run()))
        async with asyncio.timeout(20):
            while sidecar.port == 0 or sidecar.report.not_ready():
                if task.done():
                    task.result()
                await asyncio.sleep(0.01)
        yield sidecar, session


async def told(sidecar: Sidecar, session: aiohttp.ClientSession, path: str) -> str:
    async with session.get(f"http://127.0.0.1:{sidecar.port}{path}") as answer:
        return await answer.text()


async def loads_of(sidecar: Sidecar, session: aiohttp.ClientSession, state: str) -> Any:
    """What inspect says of /slots, once it is in this state."""
    async with asyncio.timeout(20):
        while True:
            sources = json.loads(await told(sidecar, session, "/api/v1/inspect"))["sources"]
            found = {s["source"]: s for s in sources}["loads"]
            if found["state"] == state:
                return found
            await asyncio.sleep(0.02)


async def test_slots_are_load_until_they_carry_text_and_none_of_it_comes_out(
    engine: Any, places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    places[1].mkdir(mode=0o700)
    like_llamacpp(engine)
    async with running(engine) as (sidecar, session):
        found = await loads_of(sidecar, session, "ok")
        assert found["detail"] == "1 of 2 slots of 1024 tokens work"
        shown = await told(sidecar, session, "/metrics")
        # The process behind the port is this one: whether it may share the cache is not told.
        assert 'servoscope_running{engine="llamacpp"' in shown
        assert _value(shown, "servoscope_running") == 1  # not the 3 of /metrics
        assert _value(shown, "servoscope_waiting") == 2
        engine.paths["/slots"] = [slot(prompt=f"{CANARY} text", generated=CANARY)]
        found = await loads_of(sidecar, session, "off")
        assert "carries what people wrote" in found["detail"]
        async with asyncio.timeout(20):
            while _value(await told(sidecar, session, "/metrics"), "servoscope_running") != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        everything = "".join(
            [
                await told(sidecar, session, "/metrics"),
                await told(sidecar, session, "/api/v1/inspect"),
                caplog.text,
            ]
        )
    kept = [p.read_bytes() for where in places for p in where.rglob("*") if p.is_file()]
    assert kept
    assert CANARY not in everything + caplog.text
    assert not any(CANARY.encode() in one for one in kept)


async def test_inspect_without_a_sidecar_shows_slots_and_boot_values(
    engine: Any, places: Any
) -> None:
    del places
    like_llamacpp(engine)
    shown = await inspection.inspect_url(engine.url, SidecarConfig())
    sources = {s["source"]: s for s in shown["sources"]}
    assert list(sources) == ["plugin", "tap", "relay", "scrape", "loads"]
    assert sources["loads"]["detail"] == "1 of 2 slots of 1024 tokens work"
    assert any("wait for a slot" in what for what in sources["loads"]["blind_to"])
    knobs = {k["name"]: k for k in shown["knobs"]}
    assert (knobs["max_running_requests"]["value"], knobs["max_running_requests"]["mode"]) == (
        2, "restart",
    )  # fmt: skip
    assert "--live-chunk" in shown["knobs_why"]
    assert CANARY not in json.dumps(shown)


def _value(text: str, name: str) -> float | None:
    """Of the one series; ``None`` between the end of one source's gauge and the next reading."""
    found = [x for x in text.splitlines() if x.startswith(f"{name}{{")]
    return float(found[0].rsplit(" ", 1)[1]) if found else None

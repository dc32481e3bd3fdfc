"""What a sidecar says of its sources: which, in which state, and what to do about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from servoscope.exporters.records import KnobMode, RequestRecord, Source, SourceState
from servoscope.sidecar.attach.target import Target, attach
from servoscope.sidecar.config import ConfigError, SidecarConfig
from servoscope.sidecar.service import Sidecar
from servoscope.sidecar.sources import candidates

MISSING = "the right to capture is missing; grant it: setcap"
Build = Callable[..., Sidecar]


@pytest.fixture
async def build(
    engine: Any, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Build]:
    """A wired sidecar that does not run, on a host without the right to capture."""
    monkeypatch.setattr(candidates, "tap_missing", lambda *_asked, **_more: MISSING)
    target = await attach(engine.url)
    async with aiohttp.ClientSession() as session:

        def made(target: Target = target, **changes: Any) -> Sidecar:
            config = replace(SidecarConfig(collector_url=""), **changes)
            return Sidecar(target, config, (), session)

        made.target = target  # type: ignore[attr-defined]
        yield made


def states(sidecar: Sidecar) -> dict[Source, tuple[SourceState, str]]:
    return {s.source: (s.state, s.detail) for s in sidecar.report.statuses()}


async def test_a_tap_that_was_asked_for_and_cannot_be_had_is_a_fault(build: Build) -> None:
    assert states(build(tap="on"))[Source.TAP] == (SourceState.FAILED, MISSING)


async def test_a_tap_that_is_only_tried_is_off_and_says_what_is_missing(build: Build) -> None:
    assert states(build(tap="auto"))[Source.TAP] == (SourceState.OFF, MISSING)


async def test_what_is_not_configured_says_by_which_key(build: Build) -> None:
    found = states(build(tap="off"))
    assert "sidecar.tap" in found[Source.TAP][1]
    assert "sidecar.relay" in found[Source.RELAY][1]


async def test_an_engine_without_a_plug_in_of_ours_says_so(build: Build) -> None:
    target = replace(build.target, engine="llamacpp")  # type: ignore[attr-defined]
    sidecar = build(target)
    assert states(sidecar)[Source.PLUGIN] == (SourceState.OFF, "there is no plug-in for llamacpp")
    knobs = {knob.name: knob for knob in await sidecar.control.knobs()}
    assert {knob.mode for knob in knobs.values()} == {KnobMode.RESTART}
    assert "--batch-size" in knobs["chunk_tokens"].why
    assert "llamacpp" in sidecar.control.why
    assert [s.source for s in sidecar.report.statuses()][-1] is Source.LOADS
    assert build(target, loads_interval_seconds=0).loads is None


async def test_it_is_ready_when_a_source_was_chosen_and_the_engine_was_read(build: Build) -> None:
    sidecar = build(tap="off")
    assert sidecar.report.not_ready() == "looking for a source of requests"
    sidecar.plugin.settled = True
    sidecar.selection.choose()
    assert sidecar.report.not_ready() == "the engine was not read yet"
    await sidecar.scrape.once()
    assert sidecar.report.not_ready() is None
    assert (await sidecar.report.inspect())["requests_from"] == "scrape"


async def test_losses_of_every_kind_are_on_metrics(
    build: Build, make_record: Callable[..., RequestRecord]
) -> None:
    sidecar = build(tap="off")
    broken: Any = make_record()
    broken.streaming = []
    sidecar.pipeline.take(broken)
    sidecar.pipeline.take(make_record(queue_seconds=-1.0))
    text = sidecar.report.render(False)
    assert 'source_dropped_total{engine="vllm"' in text
    assert 'reason="not_countable"} 1' in text
    assert 'source="plugin",field="queue_seconds"} 1' in text
    assert "reconcile_requests_total" in text
    assert 'side="engine"' not in text  # the engine was not read: no zero that was not counted


async def test_the_relay_needs_an_address(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"sidecar\.relay"):
        build(relay="nowhere")

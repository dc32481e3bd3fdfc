"""KnobControl over an engine of another kind: simulated SGLang ranks behind real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.background import background
from exporters.sglang import engine_fakes as fakes
from servoscope.exporters.knobs.server import KnobHandler, socket_name
from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.records import Knob, KnobMode
from servoscope.sidecar.config import ControlConfig
from servoscope.sidecar.control.audit import AuditLog
from servoscope.sidecar.control.kinds import knob_kind, with_boot_values
from servoscope.sidecar.control.knobs import ControlError, KnobControl


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[fakes.Group, list[Path]]]:
    group = fakes.Group(2)
    paths = [tmp_path / socket_name(pilot, 100 + n) for n, pilot in enumerate(group.pilots)]
    servers = [
        LineServer(path, KnobHandler(pilot, clock))
        for path, pilot, clock in zip(paths, group.pilots, group.clocks, strict=True)
    ]
    for server in servers:
        server.start()
    yield group, paths
    for server in servers:
        server.stop()


async def loop(group: fakes.Group) -> None:
    while True:
        group.step()
        await asyncio.sleep(0.005)


async def test_a_set_tells_and_writes_down_what_the_engine_changed_with_it(
    ranks: tuple[fakes.Group, list[Path]], tmp_path: Path
) -> None:
    group, paths = ranks
    audit = tmp_path / "audit.jsonl"
    control = KnobControl(
        ControlConfig(), AuditLog(audit, 1_000_000), "h:1", lambda: paths, engine="sglang",
        clock=time.time,
    )  # fmt: skip
    async with background(loop(group)):
        told = await control.set({"chunk_tokens": 512}, "ann")
        assert told == {"chunk_tokens": 512, "prefill_decode_interval": 1}
        assert json.loads(audit.read_text().splitlines()[-1])["after"] == told
        assert control.why == ""
        shown = {knob.name: knob.value for knob in await control.knobs()}
        assert shown["chunk_tokens"] == 512
        with pytest.raises(ControlError, match="make decode wait longer") as refused:
            await control.set({"prefill_decode_interval": 0}, "ann")
        assert refused.value.status == 422
        await control.release("ann")
        async with asyncio.timeout(5):
            while group.values()[1]["chunk_tokens"] != 2048:  # noqa: ASYNC110 - simulated ranks
                await asyncio.sleep(0.01)
    await control.aclose()


@pytest.mark.parametrize(
    ("version", "why"), [("0.5.10", "has no plug-in system"), ("0.5.23", "SERVOSCOPE_KNOBS=1")]
)
async def test_without_sockets_the_reason_is_the_versions(
    tmp_path: Path, version: str, why: str
) -> None:
    control = KnobControl(
        ControlConfig(), AuditLog(tmp_path / "a", 1_000), "h:1", list, engine="sglang",
        clock=time.time, version=lambda: version,
    )  # fmt: skip
    assert why in control.why
    assert all(knob.value is None for knob in await control.knobs())
    with pytest.raises(ControlError, match=why):
        await control.set({"chunk_tokens": 512}, "ann")
    await control.aclose()


def test_engines_without_knobs_have_no_kind() -> None:
    assert knob_kind("tgi") is None
    for engine in ("vllm", "sglang", "llamacpp"):
        kind = knob_kind(engine)
        assert kind is not None
        assert kind.describe([])


def test_boot_values_are_shown_for_knobs_that_nobody_steers() -> None:
    kind = knob_kind("llamacpp")
    assert kind is not None
    told = {"chunk_tokens": 512.0, "max_running_requests": 4.0, "unheard_of": 1.0}
    found = {knob.name: knob for knob in with_boot_values(kind.describe([]), told)}
    assert found["chunk_tokens"].value == found["chunk_tokens"].boot_value == 512
    assert found["max_running_requests"].boot_value == 4
    assert found["ubatch_tokens"].value is None
    assert {knob.mode for knob in found.values()} == {KnobMode.RESTART}
    assert "unheard_of" not in found


def test_a_knob_that_is_steered_keeps_its_own_values() -> None:
    steered = Knob(
        name="chunk_tokens", mode=KnobMode.LIVE, unit="tokens", value=64.0, boot_value=512.0,
        minimum=5.0, maximum=512.0,
    )  # fmt: skip
    assert with_boot_values([steered], {"chunk_tokens": 2048.0}) == [steered]

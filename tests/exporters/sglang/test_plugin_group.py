"""The sockets of all ranks, and the sidecar's side of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engines.background import background
from exporters.sglang import engine_fakes as fakes
from servoscope.exporters.knobs.client import KnobClient, KnobRefused
from servoscope.exporters.knobs.server import KnobHandler, socket_name
from servoscope.exporters.plugin.hello import ProtocolError
from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.records import KnobMode
from servoscope.exporters.sglang import knobs
from servoscope.exporters.sglang.knobs import SglangKnobGroup, describe, why_none


class Engine:
    """A group of ranks with their sockets; ``run`` is the loop that all of them make."""

    def __init__(self, directory: Path, size: int = 2) -> None:
        self.group = fakes.Group(size)
        self.paths = []
        for pilot, clock in zip(self.group.pilots, self.group.clocks, strict=True):
            path = directory / socket_name(pilot, 100 + pilot.place.tp_rank)
            LineServer(path, KnobHandler(pilot, clock)).start()
            self.paths.append(path)

    async def run(self) -> None:
        while True:
            self.group.step()
            await asyncio.sleep(0.005)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine(tmp_path: Path, line_servers: list[LineServer]) -> MakeEngine:
    return partial(Engine, tmp_path)


async def test_a_setting_is_confirmed_by_every_rank(engine: MakeEngine) -> None:
    one = engine(3)
    assert [path.name for path in one.paths] == [
        "knobs-100-dp0.sock", "knobs-101-dp0-tp1.sock", "knobs-102-dp0-tp2.sock",
    ]  # fmt: skip
    group = await SglangKnobGroup.connect(reversed(one.paths))
    async with background(one.run()):
        assert await group.lease("me", 30) == 30
        (applied,) = await group.set({"chunk_tokens": 512})
        assert (applied["chunk_tokens"], applied["prefill_decode_interval"]) == (512, 1)
        assert {v["chunk_tokens"] for v in one.group.values()} == {512}
        (state,) = await group.get()
        assert (state.rank, state.lease_owner) == (0, "me")
        shown = {knob.name: knob for knob in describe([state])}
        assert shown["chunk_tokens"].mode is KnobMode.LIVE
        assert (shown["chunk_tokens"].value, shown["chunk_tokens"].maximum) == (512, 2048)
        assert shown["mixed_chunk"].mode is KnobMode.OBSERVE
        assert "goes with it" in (shown["chunk_tokens"].why or "")
        assert await group.renew() == 30
        with pytest.raises(KnobRefused, match="make decode wait longer"):
            await group.set({"prefill_decode_interval": 0})
        (applied,) = await group.set({"chunk_tokens": 2048})  # what was refused left no trace
        assert applied["prefill_decode_interval"] == 0
        await group.set({"chunk_tokens": 512})
        await group.release()
        await until(lambda: {v["chunk_tokens"] for v in one.group.values()} == {2048})
    await group.aclose()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_rank_that_does_not_follow_brings_the_old_values_back(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs, "CONFIRM_SECONDS", 0.2)
    one = engine(2)
    stubborn = one.group.pilots[1]
    monkeypatch.setattr(type(stubborn), "_take", _unless(stubborn))
    group = await SglangKnobGroup.connect(one.paths)
    async with background(one.run()):
        await group.lease("me", 30)
        with pytest.raises(
            KnobRefused, match="old values are back: DP rank 0 TP rank 1 shows chunk_tokens=2048"
        ):
            await group.set({"chunk_tokens": 512})
        await until(lambda: one.group.values()[0]["chunk_tokens"] == 2048)
        assert one.group.values()[0] == one.group.values()[1]
    await group.aclose()


def _unless(stubborn: object) -> Callable[..., None]:
    from servoscope.exporters.sglang.steering import Pilot  # noqa: PLC0415 - the real one

    take = Pilot._take

    def _take(pilot: Pilot, values: object) -> None:
        if pilot is not stubborn:
            take(pilot, values)  # type: ignore[arg-type]

    return _take


async def test_an_engine_that_stands_still_confirms_nothing(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs, "CONFIRM_SECONDS", 0.1)
    one = engine(1)
    group = await SglangKnobGroup.connect(one.paths)
    await group.lease("me", 30)
    with pytest.raises(KnobRefused, match="not set, the old values are back"):
        await group.set({"chunk_tokens": 512})
    one.group.step()  # it goes on: nothing of the setting is left
    assert one.group.values()[0] == one.group.first.envelope.boot.as_json()
    await group.aclose()


async def test_a_missing_rank_is_told_and_nothing_is_set(engine: MakeEngine) -> None:
    one = engine(2)
    group = await SglangKnobGroup.connect(one.paths[:1])
    await group.lease("me", 30)
    with pytest.raises(KnobRefused, match="DP rank 0 TP rank 1 has no knobs socket"):
        await group.set({"chunk_tokens": 512})
    one.group.step()
    assert one.group.values()[0]["chunk_tokens"] == 2048
    shown = describe(await group.get())
    assert {knob.mode for knob in shown} <= {KnobMode.RESTART, KnobMode.OBSERVE}
    assert "TP rank 1 has no knobs socket; restart with" in (shown[0].why or "")
    await group.aclose()


async def test_ranks_that_differ_are_shown_without_a_value(engine: MakeEngine) -> None:
    one = engine(2)
    one.group.schedulers[1].chunked_prefill_size = 128  # by somebody else's hand
    group = await SglangKnobGroup.connect(one.paths)
    states = await group.get()
    assert len(states) == 2
    chunk = describe(states)[0]
    assert (chunk.value, chunk.why) == (None, "ranks differ: 128, 2048")
    await group.aclose()


async def test_further_ranks_take_no_lease_and_no_first_rank_is_an_error(
    engine: MakeEngine,
) -> None:
    one = engine(2)
    client = await KnobClient.connect(one.paths[1])
    with pytest.raises(KnobRefused, match="first rank of the group"):
        await client.lease("me", 30)
    await client.aclose()
    with pytest.raises(ProtocolError, match="none of the knobs sockets is a first rank's"):
        await SglangKnobGroup.connect(one.paths[1:])


async def test_another_owner_is_kept_out_until_the_lease_is_over(engine: MakeEngine) -> None:
    one = engine(1)
    first, second = [await SglangKnobGroup.connect(one.paths) for _ in range(2)]
    async with background(one.run()):
        await first.lease("a", 10)
        await first.set({"chunk_tokens": 256})
        with pytest.raises(KnobRefused, match="held by a"):
            await second.lease("b", 10)
        one.group.pass_seconds(10.5)
        await until(lambda: one.group.values()[0]["chunk_tokens"] == 2048)
        assert await second.lease("b", 10) == 10
        with pytest.raises(KnobRefused, match="held by b"):
            await first.renew()
    for group in (first, second):
        await group.aclose()


async def test_values_out_of_bounds_are_refused_with_the_knob(engine: MakeEngine) -> None:
    one = engine(1)
    group = await SglangKnobGroup.connect(one.paths)
    await group.lease("me", 30)
    with pytest.raises(KnobRefused, match="chunk_tokens=4096: above the value at boot, 2048"):
        await group.set({"chunk_tokens": 4096})
    client = await KnobClient.connect(one.paths[0])
    with pytest.raises(KnobRefused, match="unknown op"):
        await client._ask("x", op="dance")
    with pytest.raises(KnobRefused, match="values: an object"):
        await client._ask("set", op="set", values=[])
    await client.aclose()
    await group.aclose()


def test_without_a_socket_the_reason_depends_on_the_version() -> None:
    assert "SGLang 0.5.10 has no plug-in system" in why_none("0.5.10.post1") + why_none("0.5.10")
    for version in ("0.5.11", "0.6.0", None, "unknown"):
        assert "SERVOSCOPE_KNOBS=1" in why_none(version)
    assert {knob.mode for knob in describe([])} == {KnobMode.RESTART, KnobMode.OBSERVE}
    assert describe([])[0].why is not None
    assert "--chunked-prefill-size" in (describe([])[0].why or "")


@pytest.mark.parametrize(
    ("tp_rank", "tp_size"), [(0, 10**15), (0, 0), (-1, 2), (2, 2), (10**400, 10**401)]
)
async def test_a_group_whose_size_cannot_be_is_no_group(
    engine: MakeEngine, tp_rank: int, tp_size: int
) -> None:
    """Its ranks are gone through one by one: a size from the wire is bounded first."""
    client = await KnobClient.connect(engine(1).paths[0])
    client.hello = replace(client.hello, boot_values={"tp_rank": tp_rank, "tp_size": tp_size})
    with pytest.raises(ProtocolError, match="cannot be"):
        SglangKnobGroup([client])
    await client.aclose()

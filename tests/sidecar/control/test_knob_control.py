"""Knobs: one lease, all ranks, written down before and after, given back at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.background import background
from servoscope.exporters.knobs.client import KnobRefused
from servoscope.exporters.knobs.reading import KnobState, RankKnob
from servoscope.exporters.records import KnobMode
from servoscope.sidecar.config import ControlConfig
from servoscope.sidecar.control.audit import AuditLog
from servoscope.sidecar.control.knobs import ControlError, KnobControl
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.publish.knob_metrics import KnobMetrics


def knob_state(value: float, rank: int = 0, steps: int = 10) -> KnobState:
    return KnobState(
        rank=rank, knobs={"chunk_tokens": RankKnob(value, 2048.0, 33.0, 2048.0)},
        in_force={"chunk_tokens": int(value)}, lease_owner=None, lease_seconds_left=None,
        leases_expired_total=0, bypass=False, off="", faults=0, running=1, waiting=0, steps=steps,
        empty_steps=0, held_steps=0, scheduled_tokens=100 * steps, step_tokens_max=int(value),
        scheduler_cpu_seconds=0.5, plugin_cpu_seconds=0.01,
    )  # fmt: skip


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0.01)


class FakeRanks:
    """What KnobGroup does, in this process."""

    def __init__(self) -> None:
        self.value = 2048.0
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.hang = False
        self.closed = 0

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.hang:
            await asyncio.Event().wait()
        if name in self.fail:
            raise self.fail[name]

    async def get(self) -> list[KnobState]:
        await self._called("get")
        return [knob_state(self.value), knob_state(self.value, rank=1)]

    async def lease(self, owner: str, ttl_s: float) -> float:
        await self._called("lease")
        return ttl_s

    async def renew(self) -> float:
        await self._called("renew")
        return 30.0

    async def set(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        await self._called("set")
        self.value = values["chunk_tokens"]
        return [{"chunk_tokens": self.value, "max_running_requests": 64.0}] * 2

    async def release(self) -> None:
        await self._called("release")
        self.value = 2048.0

    async def aclose(self) -> None:
        self.closed += 1


class Bench:
    """A KnobControl over FakeRanks."""

    def __init__(self, directory: Path) -> None:
        self.ranks = FakeRanks()
        self.now = self.steady = 5.0
        self.sockets = [directory / "knobs-1-dp0.sock"]
        self.connects = 0
        self.audit_path = directory / "audit.jsonl"
        self.forbidden = ""
        self.audit = AuditLog(self.audit_path, 1_000_000)
        self.control = KnobControl(
            ControlConfig(renew_seconds=0.1), self.audit, "h:1", lambda: self.sockets,
            clock=lambda: self.now, steady=lambda: self.steady, connect=self._connect,
            forbidden=lambda: self.forbidden,
        )  # fmt: skip

    async def _connect(self, _paths: Sequence[Path]) -> FakeRanks:
        self.connects += 1
        return self.ranks

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_set_leases_applies_reads_back_and_is_written_down(bench: Bench) -> None:
    assert await bench.control.set({"chunk_tokens": 256}, "ann") == {"chunk_tokens": 256}
    assert bench.control.held
    begin, end = bench.lines()
    assert (begin["actor"], begin["result"], begin["asked"]) == (
        "ann", "begin", {"chunk_tokens": 256},
    )  # fmt: skip
    assert begin["before"] == {"chunk_tokens": 2048.0} | {
        k: v for k, v in begin["before"].items() if k != "chunk_tokens"
    }
    assert (end["result"], end["after"], end["server"]) == ("applied", {"chunk_tokens": 256}, "h:1")
    assert bench.control.results["chunk_tokens", "applied"] == 1


async def test_a_second_set_keeps_the_lease(bench: Bench) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    await bench.control.set({"chunk_tokens": 512}, "a")
    assert bench.ranks.calls.count("lease") == 1
    assert bench.connects == 1


async def test_what_cannot_be_written_down_is_not_done(bench: Bench) -> None:
    bench.audit_path.mkdir()
    with pytest.raises(ControlError, match="cannot be written down") as caught:
        await bench.control.set({"chunk_tokens": 256}, "a")
    assert caught.value.status == 503
    assert "set" not in bench.ranks.calls
    assert "lease" not in bench.ranks.calls
    assert bench.ranks.value == 2048.0


@pytest.mark.parametrize(
    ("at", "error", "status"),
    [
        ("lease", KnobRefused("held by other"), 409),
        ("set", KnobRefused("chunk_tokens=9: below 33"), 422),
        ("set", ConnectionResetError("gone"), 503),
    ],
)
async def test_refusals_have_their_status_and_leave_no_lease(
    bench: Bench, at: str, error: Exception, status: int
) -> None:
    bench.ranks.fail[at] = error
    with pytest.raises(ControlError, match=str(error)) as caught:
        await bench.control.set({"chunk_tokens": 9}, "a")
    assert caught.value.status == status
    assert not bench.control.held
    assert bench.lines()[-1]["result"] == "refused"
    assert bench.control.results["chunk_tokens", "refused"] == 1


@pytest.mark.parametrize(
    "values", [{}, {"a": "1"}, {"a": True}, {"a": float("nan")}, {"a": None},
               {"a": float("inf")}, {"a": 10**400}, {"a": -(10**400)}, {"a": 1e300},
               {f"k{i}": 1 for i in range(100)}],
)  # fmt: skip
async def test_bad_requests(bench: Bench, values: dict[str, Any]) -> None:
    with pytest.raises(ControlError) as caught:
        await bench.control.set(values, "a")
    assert caught.value.status == 400
    assert bench.ranks.calls == []


async def test_without_knobs_it_says_what_to_do(bench: Bench) -> None:
    bench.sockets = []
    with pytest.raises(ControlError, match="SERVOSCOPE_KNOBS=1") as caught:
        await bench.control.set({"chunk_tokens": 256}, "a")
    assert caught.value.status == 404
    knobs = {k.name: k.mode for k in await bench.control.knobs()}
    assert knobs["chunk_tokens"] is KnobMode.RESTART


async def test_the_lease_is_renewed_while_it_is_held_and_not_before(bench: Bench) -> None:
    async with background(bench.control.run()):
        await asyncio.sleep(0.25)
        assert "renew" not in bench.ranks.calls
        await bench.control.set({"chunk_tokens": 256}, "a")
        await until(lambda: bench.ranks.calls.count("renew") >= 2)
        bench.ranks.fail["renew"] = ConnectionResetError("gone")
        await until(lambda: bench.connects >= 3)  # it comes back, and takes its own lease over
        assert bench.control.held
        bench.ranks.fail = {"renew": KnobRefused("no lease: it ran out"), "lease": KnobRefused("x")}
        await until(lambda: not bench.control.held)
        assert bench.lines()[-1]["action"] == "lease lost"
        assert bench.control.results["all", "reverted"] == 1


async def test_a_lease_that_could_not_be_renewed_in_time_is_lost(bench: Bench) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    bench.ranks.fail["renew"] = ConnectionRefusedError("gone")
    await bench.control._renew()
    assert bench.control.held  # the engine still has it
    bench.steady += 31.0
    await bench.control._renew()
    assert not bench.control.held
    assert bench.lines()[-1]["action"] == "lease lost"


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_step_of_the_wall_clock_drops_no_lease(bench: Bench, jump: float) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    bench.ranks.fail["renew"] = ConnectionRefusedError("gone")
    bench.now += jump
    bench.steady += 29.0
    await bench.control._renew()
    assert bench.control.held
    bench.steady += 2.0
    await bench.control._renew()
    assert not bench.control.held


async def test_what_the_policy_forbids_is_refused_written_down_and_never_reaches_the_engine(
    bench: Bench,
) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    bench.forbidden = "the collector's policy is control mode 'observe'"
    calls = list(bench.ranks.calls)
    with pytest.raises(ControlError, match="observe") as caught:
        await bench.control.set({"chunk_tokens": 512}, "ann")
    assert caught.value.status == 409
    assert bench.ranks.calls == calls
    last = bench.lines()[-1]
    assert (last["actor"], last["result"], last["asked"]) == (
        "ann", "refused", {"chunk_tokens": 512},
    )  # fmt: skip
    assert bench.control.results["chunk_tokens", "refused"] == 1
    await bench.control.states()
    assert "observe" in bench.control.why
    assert bench.control.held  # what was set before stays until it is given back
    await bench.control.release("ann")
    assert (bench.control.held, bench.ranks.value) == (False, 2048.0)


async def test_a_policy_makes_no_bad_request_good(bench: Bench) -> None:
    bench.forbidden = ""
    bench.sockets = []
    with pytest.raises(ControlError) as caught:
        await bench.control.set({"chunk_tokens": 256}, "a")
    assert caught.value.status == 404


async def test_release_and_the_end_give_the_knobs_back(bench: Bench) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    await bench.control.release("a")
    assert bench.ranks.value == 2048.0
    assert not bench.control.held
    await bench.control.release("a")  # nothing held: nothing to do
    assert bench.ranks.calls.count("release") == 1
    await bench.control.set({"chunk_tokens": 256}, "a")
    await bench.control.aclose()
    assert bench.ranks.calls.count("release") == 2
    assert bench.ranks.closed == 1


async def test_release_without_knobs_is_refused_with_the_reason(bench: Bench) -> None:
    bench.control._engine = "llamacpp"
    bench.control._find = lambda: ()
    with pytest.raises(ControlError, match=r"no knob of llamacpp can be set live: .*observe only"):
        await bench.control.release("a")
    await bench.control.aclose()  # the end refuses nothing


async def test_a_restarted_engine_is_not_set_again(bench: Bench) -> None:
    await bench.control.set({"chunk_tokens": 256}, "a")
    calls = len(bench.ranks.calls)
    await bench.control.engine_restarted()
    assert not bench.control.held
    assert len(bench.ranks.calls) == calls
    assert bench.lines()[-1]["action"] == "engine restarted"


async def test_knobs_that_do_not_answer_are_no_outage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servoscope.sidecar.control.knobs._ANSWER_SECONDS", 0.05)
    bench.ranks.hang = True
    assert list(await bench.control.states()) == []
    assert "do not answer" in bench.control.why


def test_knob_metrics_by_rank_and_across_a_restart() -> None:
    registry = Registry()
    metrics = KnobMetrics(registry)
    identity = Identity("vllm", "h:1", "m", "v", "none")
    metrics.publish([knob_state(256), knob_state(512, rank=1)], identity, "one")
    values = registry.family("knob_value").values()
    assert values["vllm", "h:1", "0", "chunk_tokens"] == 256
    assert values["vllm", "h:1", "1", "chunk_tokens"] == 512
    assert registry.family("knob_boot_value").values()["vllm", "h:1", "0", "chunk_tokens"] == 2048
    bounds = registry.family("knob_bound").values()
    assert bounds["vllm", "h:1", "0", "chunk_tokens", "min"] == 33
    modes = registry.family("knob_mode").values()
    assert modes["vllm", "h:1", "chunk_tokens", "live"] == 1.0
    metrics.publish([knob_state(2048, steps=2)], identity, "two")
    steps = registry.family("scheduler_steps_total").values()
    assert steps["vllm", "h:1", "m", "v", "none", "0"] == 12
    metrics.publish([], identity, "two")
    assert len(registry.family("knob_value")) == 0
    assert len(registry.family("scheduler_steps_total")) == 2

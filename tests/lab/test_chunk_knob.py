"""The embedded engine's chunk as a knob: what is told to the hook, and when it is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.reading import state_from_message
from servoscope.exporters.records import KnobMode
from servoscope.lab.embedded.chunk_knob import (
    NOT_ASKED,
    ChunkEnvelope,
    ChunkHandler,
    ChunkPilot,
    ChunkValues,
)
from servoscope.sidecar.control.kinds import knob_kind

BOOT, SLOTS = 512, 4


class FakeHook:
    """Counts as the engine would ask; remembers what it was told."""

    def __init__(self, boot: int = BOOT) -> None:
        self.told: list[tuple[int, float]] = []
        self.steps = 7
        self.last = -1000.0
        self._boot = boot

    def set(self, tokens: int, until: float) -> None:
        self.told.append((tokens, until))

    def boot(self) -> int:
        return self._boot

    def used(self) -> int:
        return self.told[-1][0] or self._boot if self.told else self._boot

    def asked(self) -> int:
        return self.steps

    def asked_at(self) -> float:
        return self.last


class Peer:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Bench:
    def __init__(self, boot: int = BOOT) -> None:
        self.now = 100.0
        self.hook = FakeHook(boot)
        self.pilot = ChunkPilot(self.hook, slots=SLOTS, model_name="tiny", clock=lambda: self.now)
        self.handler = ChunkHandler(self.pilot, lambda: self.now)
        self.peer: Any = Peer()

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        self.handler.received(self.peer, {"id": 1, "op": op, **more})
        self.tick()
        answer: dict[str, Any] = self.peer.sent[-1]
        return answer

    def tick(self) -> float:
        return self.handler.tick([self.peer])

    def state(self) -> Any:
        return state_from_message(self.ask("get"))


def test_what_is_set_goes_to_the_hook_with_its_end() -> None:
    bench = Bench()
    assert bench.ask("lease", owner="a", ttl_s=20)["type"] == "leased"
    answer = bench.ask("set", values={"chunk_tokens": 64})
    assert answer["applied"] == {"chunk_tokens": 64}
    assert bench.hook.told == [(64, 120.0)]
    bench.now = 110.0
    bench.ask("renew")
    assert bench.hook.told[-1] == (64, 130.0)
    assert bench.ask("release")["type"] == "released"
    assert bench.hook.told[-1] == (0, 0.0)


def test_a_lease_that_runs_out_takes_it_back() -> None:
    bench = Bench()
    bench.ask("lease", owner="a", ttl_s=5)
    bench.ask("set", values={"chunk_tokens": 64})
    bench.now += 5.1
    bench.tick()
    assert bench.hook.told[-1] == (0, 0.0)
    state = bench.state()
    assert state.knobs["chunk_tokens"].value == BOOT
    assert (state.leases_expired_total, state.lease_owner) == (1, None)


def test_the_hook_is_told_of_changes_only() -> None:
    bench = Bench()
    for _ in range(3):
        bench.tick()
        bench.ask("get")
    assert bench.hook.told == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (SLOTS, "below 5: a token of each of 4 slots"), (BOOT + 1, "above the value at boot, 512"),
        (0, "below 5"), (-1, "below 5"), (64.5, "not a whole number"), ("64", "not a number"),
        (float("nan"), "not a finite number"), (True, "not a number"),
    ],
)  # fmt: skip
def test_a_value_out_of_the_boot_envelope_is_refused(value: Any, why: str) -> None:
    bench = Bench()
    bench.ask("lease", owner="a")
    answer = bench.ask("set", values={"chunk_tokens": value})
    assert (answer["type"], answer["knob"]) == ("refused", "chunk_tokens")
    assert why in answer["why"]
    assert bench.hook.told == []


def test_without_the_lease_or_for_another_knob_nothing_is_set() -> None:
    bench = Bench()
    assert "no lease" in bench.ask("set", values={"chunk_tokens": 64})["why"]
    bench.ask("lease", owner="a")
    assert "no such knob" in bench.ask("set", values={"batch_window_seconds": 0.1})["why"]
    assert bench.hook.told == []


def test_a_set_waits_for_a_step_of_an_engine_that_works() -> None:
    bench = Bench()
    bench.ask("lease", owner="a")
    bench.hook.last = bench.now
    bench.handler.received(bench.peer, {"id": 2, "op": "set", "values": {"chunk_tokens": 64}})
    bench.tick()
    assert bench.peer.sent[-1]["type"] == "leased"  # not answered yet
    bench.hook.steps += 1
    bench.tick()
    assert bench.peer.sent[-1] == {
        "id": 2, "type": "set", "applied": {"chunk_tokens": 64}, "pending": False,
    }  # fmt: skip
    idle = bench.peer.sent[-1]
    bench.now += 60
    assert bench.pilot.counts() == (0, 0)
    assert idle["pending"] is False


def test_the_sidecar_describes_it_as_live_and_the_rest_as_of_the_start() -> None:
    kind = knob_kind("llamacpp")
    assert kind is not None
    assert not kind.counts_steps  # this socket knows of no steps: none are published
    bench = Bench()
    bench.ask("lease", owner="a")
    bench.ask("set", values={"chunk_tokens": 64})
    knobs = {knob.name: knob for knob in kind.describe([bench.state()])}
    chunk = knobs["chunk_tokens"]
    assert (chunk.mode, chunk.value, chunk.boot_value) == (KnobMode.LIVE, 64, BOOT)
    assert (chunk.minimum, chunk.maximum) == (SLOTS + 1, BOOT)
    assert knobs["ubatch_tokens"].mode is KnobMode.RESTART
    assert bench.state().in_force == {"chunk_tokens": 64}


def test_an_engine_that_does_not_ask_the_hook_has_no_knob_and_says_why() -> None:
    bench = Bench(boot=0)
    assert bench.handler.hello()["off"] == NOT_ASKED
    assert "knobs are off" in bench.ask("lease", owner="a")["why"]
    state = bench.state()
    assert (state.knobs, state.off) == ({}, NOT_ASKED)
    assert bench.hook.told == []


@given(boot=st.integers(1, 10_000), slots=st.integers(1, 64), value=st.integers(-10, 20_000))
def test_what_is_accepted_leaves_room_and_never_grows_the_batch(
    boot: int, slots: int, value: int
) -> None:
    envelope = ChunkEnvelope(boot=ChunkValues(boot), slots=slots)
    try:
        found = envelope.changed(envelope.boot, {"chunk_tokens": value})
    except KnobRefusedError:
        assert value != boot
        assert value > boot or value < slots + 1
    else:
        assert found.chunk_tokens <= boot
        assert found.chunk_tokens > slots or found.chunk_tokens == boot

"""Socket, client and group, on simulated schedulers of vLLM."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.background import background
from exporters.vllm import fakes
from servoscope.exporters.knobs.client import KnobClient, KnobRefused, find_knob_sockets
from servoscope.exporters.knobs.group import KnobGroup
from servoscope.exporters.knobs.reading import KnobState, state_from_message
from servoscope.exporters.knobs.server import KnobHandler
from servoscope.exporters.plugin.hello import ProtocolError
from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.records import KnobMode
from servoscope.exporters.vllm.knobs import describe
from servoscope.exporters.vllm.scheduler import Pilot, steered


class Core:
    """One engine core: a steered fake scheduler and its socket."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.clock = fakes.Clock()
        pilots: list[Pilot] = []
        self.scheduler = steered(fakes.Scheduler, pilots.append)(fakes.vllm_config(**config))
        self.pilot = pilots[0]
        self.pilot._clock = self.clock
        handler = KnobHandler(self.pilot, self.clock)
        self.server = LineServer(path, handler)
        self.server.start()


MakeCore = Callable[..., Core]


@pytest.fixture
def core(tmp_path: Path, line_servers: list[LineServer]) -> MakeCore:
    cores: list[Core] = []

    def make(**config: Any) -> Core:
        cores.append(Core(tmp_path / f"knobs-{100 + len(cores)}-dp{len(cores)}.sock", **config))
        return cores[-1]

    return make


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_set_read_back_and_release(core: MakeCore) -> None:
    one = core()
    client = await KnobClient.connect(one.path)
    assert client.hello.boot_values["chunk_tokens"] == 2048
    assert await client.lease("me", 99) == 30.0
    applied = await client.set({"chunk_tokens": 256, "batch_window_seconds": 0.2})
    assert (applied["chunk_tokens"], applied["batch_window_seconds"]) == (256, 0.2)
    one.scheduler.add_request(fakes.SchedulerRequest("a", 1000, 4))
    one.scheduler.schedule()
    state = await client.get()
    assert state.in_force["chunk_tokens"] == 256
    assert state.knobs["chunk_tokens"].value == 256
    assert (state.lease_owner, state.held_steps) == ("me", 1)
    await client.release()
    state = await client.get()
    assert state.knobs["chunk_tokens"].value == 2048
    assert state.lease_owner is None
    await client.aclose()


async def test_set_answers_once_a_step_has_taken_it_over(core: MakeCore) -> None:
    one = core()
    one.scheduler.add_request(fakes.SchedulerRequest("a", 10_000, 4))
    one.scheduler.schedule()
    client = await KnobClient.connect(one.path)
    await client.lease("me")
    async with background(client.set({"chunk_tokens": 256})) as asked:
        await until(lambda: one.pilot.law.target.values.chunk_tokens == 256)
        assert one.scheduler.max_num_scheduled_tokens == 2048  # not before the step boundary
        one.scheduler.schedule()
        assert (await asked)["chunk_tokens"] == 256
    assert one.scheduler.max_num_scheduled_tokens == 256
    await client.aclose()


async def test_refusals_come_in_words(core: MakeCore) -> None:
    one = core()
    client = await KnobClient.connect(one.path)
    with pytest.raises(KnobRefused, match="no lease"):
        await client.set({"chunk_tokens": 256})
    await client.lease("me")
    with pytest.raises(KnobRefused, match=r"chunk_tokens=9999.* above the value at boot, 2048"):
        await client.set({"chunk_tokens": 9999})
    with pytest.raises(KnobRefused, match="values: an object"):
        await client.set({})
    other = await KnobClient.connect(one.path)
    with pytest.raises(KnobRefused, match="held by me"):
        await other.lease("you")
    with pytest.raises(KnobRefused, match="held by me"):
        await other.bypass(True)
    assert (await client.get()).knobs["chunk_tokens"].value == 2048
    await client.aclose()
    await other.aclose()


async def test_a_client_that_dies_takes_its_settings_along_within_30_seconds(
    core: MakeCore,
) -> None:
    one = core()
    client = await KnobClient.connect(one.path)
    await client.lease("me")
    await client.set({"chunk_tokens": 256})
    await client.aclose()
    watcher = await KnobClient.connect(one.path)
    one.clock.now += 29.9
    assert (await watcher.get()).knobs["chunk_tokens"].value == 256
    one.clock.now += 0.2
    state = await watcher.get()
    assert state.knobs["chunk_tokens"].value == 2048  # although the engine idles
    await until(lambda: one.pilot.law.expired_total == 1)
    await watcher.aclose()


async def test_each_reader_has_its_own_largest_step(core: MakeCore) -> None:
    one = core()
    a, b = await KnobClient.connect(one.path), await KnobClient.connect(one.path)
    await a.get()
    await b.get()
    one.scheduler.add_request(fakes.SchedulerRequest("a", 1000, 4))
    one.scheduler.schedule()
    assert (await a.get()).step_tokens_max == 1000
    one.scheduler.schedule()
    assert (await a.get()).step_tokens_max == 1
    assert (await b.get()).step_tokens_max == 1000
    assert (await b.get()).step_tokens_max == 0
    await a.aclose()
    await b.aclose()


async def test_bypass_counts_nothing(core: MakeCore) -> None:
    one = core()
    client = await KnobClient.connect(one.path)
    await client.lease("me")
    await client.bypass(True)
    one.scheduler.schedule()
    assert (await client.get()).empty_steps == 0
    await client.bypass(False)
    one.scheduler.schedule()
    assert (await client.get()).empty_steps == 1
    await client.aclose()


async def test_all_ranks_or_none(core: MakeCore, tmp_path: Path) -> None:
    big, small = core(), core(max_num_batched_tokens=512)
    paths = find_knob_sockets([tmp_path], [100, 101])
    assert [p.name for p in paths] == ["knobs-100-dp0.sock", "knobs-101-dp1.sock"]
    group = await KnobGroup.connect(paths)
    await group.lease("me")
    await group.set({"chunk_tokens": 256})
    with pytest.raises(KnobRefused, match="above the value at boot, 512"):
        await group.set({"chunk_tokens": 1024})
    states = await group.get()
    assert [s.knobs["chunk_tokens"].value for s in states] == [256, 256]
    chunk = next(k for k in describe(states) if k.name == "chunk_tokens")
    assert (chunk.mode, chunk.value, chunk.maximum) == (KnobMode.LIVE, 256, 512)
    assert await group.renew() == 30.0
    await group.release()
    chunk = next(k for k in describe(await group.get()) if k.name == "chunk_tokens")
    assert chunk.value is None
    assert chunk.why == "ranks differ: 512, 2048"
    outsider = await KnobClient.connect(small.path)
    await outsider.lease("you")
    with pytest.raises(KnobRefused, match="held by you"):
        await group.lease("me")
    assert (await group.get())[0].lease_owner is None  # the first rank was given back
    await outsider.aclose()
    await group.aclose()
    assert big.pilot.faults == small.pilot.faults == 0


async def test_an_engine_that_is_gone(core: MakeCore) -> None:
    one = core()
    client = await KnobClient.connect(one.path)
    one.server.stop()
    with pytest.raises(ConnectionError):
        await client.get()
    with pytest.raises(ConnectionError):
        await client.get()
    with pytest.raises(OSError, match="No such file"):
        await KnobClient.connect(one.path)
    await client.aclose()


async def test_garbage_and_wrong_answers(tmp_path: Path) -> None:
    hello = {"type": "hello", "protocol": 1, "boot_id": "b", "pid": 1}
    answers = [
        {"id": 1, "type": "state", "knobs": {"chunk_tokens": {"value": "much"}}},
        {"id": 2, "type": "leased"},
        b"garbage\n",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(hello).encode() + b"\n")
        for answer in answers:
            await reader.readline()
            writer.write(
                answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
            )
        await reader.read()
        writer.close()

    path = tmp_path / "k.sock"
    async with await asyncio.start_unix_server(serve, path):
        client = await KnobClient.connect(path)
        with pytest.raises(ProtocolError, match=r"knobs\.chunk_tokens"):
            await client.get()
        with pytest.raises(ProtocolError, match="answer is 'leased', not released"):
            await client.release()
        with pytest.raises(ProtocolError, match="no JSON object"):
            await client.get()
        with pytest.raises(ConnectionError):  # what comes next on this connection is anybody's
            await client.get()
        await client.aclose()


ODD = [
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    True,
    "1",
    None,
    [1],
    {"value": 1},
    "nan",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda v: f"{v!r:.12}")
async def test_an_odd_answer_is_a_protocol_error_whatever_was_asked(
    tmp_path: Path, odd: object
) -> None:
    """Nothing else may come out: what steers catches link faults, and has to go on."""
    hello = {"type": "hello", "protocol": 1, "boot_id": "b", "pid": 1}
    fine = {"value": 1, "boot": 1, "minimum": 1, "maximum": 1}
    answers = {
        "lease": {"type": "leased", "ttl_s": odd},
        "renew": {"type": "leased"} if odd is None else {"type": "leased", "ttl_s": odd},
        "set": {"type": "set", "applied": {"chunk_tokens": odd}},
        "get": {"type": "state", "rank": 0, "knobs": {"chunk_tokens": {**fine, "value": odd}}},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(hello).encode() + b"\n")
        while line := await reader.readline():
            asked = json.loads(line)
            answer = {"id": asked["id"], **answers[asked["op"]]}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "k.sock"):
        client = await KnobClient.connect(tmp_path / "k.sock")
        for ask in (
            lambda: client.lease("me"),
            client.renew,
            lambda: client.set({"chunk_tokens": 1}),
            client.get,
        ):
            with pytest.raises(ProtocolError):
                await ask()
        await client.aclose()


def state_message() -> dict[str, Any]:
    """A whole answer, as the plug-in gives it."""
    knob = {"unit": "tokens", "value": 8, "boot": 9, "minimum": 1, "maximum": 9, "why": ""}
    counts = ("leases_expired_total", "faults", "running", "waiting", "steps", "empty_steps",
              "held_steps", "scheduled_tokens", "step_tokens_max")  # fmt: skip
    return {
        "type": "state", "rank": 1, "knobs": {"chunk_tokens": knob},
        "in_force": {"chunk_tokens": 8}, "lease": {"owner": "me", "seconds_left": 2.5},
        "bypass": False, "off": "", "scheduler_cpu_seconds": 0.5, "plugin_cpu_seconds": 0.25,
        **dict.fromkeys(counts, 3),
    }  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda v: f"{v!r:.12}")
def test_no_odd_number_gets_into_a_state(odd: object) -> None:
    whole = state_message()
    assert state_from_message(whole).knobs["chunk_tokens"].value == 8
    assert state_from_message({**whole, "later": odd, "lease": None}).lease_owner is None
    numbers = [n for n, v in whole.items() if isinstance(v, (int, float)) and n != "bypass"]
    for name in numbers:
        with pytest.raises(ProtocolError, match="state: counters"):
            state_from_message({**whole, name: odd})
    for name in ("value", "boot", "minimum", "maximum"):
        knob = {**whole["knobs"]["chunk_tokens"], name: odd}
        with pytest.raises(ProtocolError, match=r"state: knobs\.chunk_tokens"):
            state_from_message({**whole, "knobs": {"chunk_tokens": knob}})
    with pytest.raises(ProtocolError, match="state: in_force"):
        state_from_message({**whole, "in_force": {"chunk_tokens": odd}})
    leased = state_from_message({**whole, "lease": {"owner": odd, "seconds_left": odd}})
    assert leased.lease_seconds_left is None
    assert leased.lease_owner is None or isinstance(leased.lease_owner, str)


JSON = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.lists(st.integers()) | st.sampled_from([10**400, -(10**400)])
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["knobs", "rank", "lease", "steps", "in_force", "bypass", "off"]),
        JSON | st.dictionaries(st.text(max_size=5), JSON),
    )
)
def test_any_state_is_read_or_refused(message: dict[str, Any]) -> None:
    state = None
    try:
        state = state_from_message({**state_message(), **message})
    except ProtocolError as error:
        text = str(error)
    if state is None:
        assert text.startswith("state: ")
    else:
        assert isinstance(state, KnobState)


async def test_an_engine_that_refuses_a_knob_shows_it(core: MakeCore) -> None:
    one = core(enable_chunked_prefill=False)
    client = await KnobClient.connect(one.path)
    knobs = {k.name: k for k in describe([await client.get()])}
    assert knobs["chunk_tokens"].mode is KnobMode.OBSERVE
    assert "chunked prefill is off" in knobs["chunk_tokens"].why
    assert knobs["max_running_requests"].mode is KnobMode.LIVE
    await client.aclose()

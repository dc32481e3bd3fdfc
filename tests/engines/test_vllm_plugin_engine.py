"""The plug-in inside a real vLLM, under Scheduler and under AsyncScheduler.

One engine a scheduler class, both in the same runtime directory; the first one is killed, so the
second one also shows what becomes of a dead engine's sockets.

Nothing here may depend on how fast the machine is: a request that a client leaves is one that no
engine can have finished by then, and what must happen during a request is waited for, not timed.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engines.background import background
from engines.knob_session import load, long_prompts
from engines.product import Product, wait_for
from engines.truth import Medians
from engines.vllm_cpu import VllmServer
from servoscope.exporters.knobs.client import KnobClient, KnobRefused, find_knob_sockets
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.records import Outcome, Phase, RequestRecord
from servoscope.exporters.vllm.requests import StatsClient, find_stats_sockets
from servoscope.lab.client import CHAT, COMPLETIONS, Observed, PlannedRequest, run_closed, run_open

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LONGEST_TICK_SECONDS = 0.01  # of a Linux kernel (HZ=100): what its stamps of a socket may be off
SHARED = "def shared_prefix(number): return number * 2\n" * 40  # some KV blocks of 128 tokens
TYPES = ("chat", "summarise", "generate", "rag")
LONG = "import os, sys, json  # a long prompt to be cut into chunks\n"
#: Answers that last. The model's length is 8192: at 1 ms a token, several times as fast as two
#: cores are, these are 4 s and 8 s long, and all that happens during them takes below 1 s.
LASTING_TOKENS, LONGEST_TOKENS = 4000, 8000


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servoscope-run")


@pytest.fixture(scope="module", params=["Scheduler", "AsyncScheduler"])
def server(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[VllmServer]:
    asynchronous = request.param == "AsyncScheduler"
    with VllmServer(
        knobs=True, asynchronous=asynchronous, dtype="float32", run_dir=run_dir
    ) as running:
        yield running
        running.kill()  # as a crash: nothing is cleaned up


def stats_socket(server: VllmServer) -> Path:
    (path,) = find_stats_sockets([server.run_dir], server.pids())
    return path


@asynccontextmanager
async def knobs(server: VllmServer, *, lease: bool = True) -> AsyncIterator[KnobClient]:
    """A client of the knobs socket; boot values come back with the end of the block."""
    (path,) = find_knob_sockets([server.run_dir], server.pids())
    control = await KnobClient.connect(path)
    try:
        if lease:
            await control.lease("test")
        yield control
    finally:
        try:
            if lease:
                await control.release()  # of a failed test too: the next one finds boot values
        finally:
            await control.aclose()


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.05)


async def state_with(
    control: KnobClient, condition: Callable[[KnobState], bool], seconds: float = 60
) -> KnobState:
    """The first state that is so."""
    deadline = time.monotonic() + seconds
    while not condition(state := await control.get()):
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.01)
    return state


@asynccontextmanager
async def reading(server: VllmServer) -> AsyncIterator[tuple[StatsClient, list[RequestRecord]]]:
    """A sidecar's client, attached as long as the block lasts."""
    client = StatsClient(stats_socket(server), open_poll_seconds=0.1)
    records: list[RequestRecord] = []
    async with background(client.run(records.append)) as task:
        await until(lambda: client.hello is not None or task.done())
        yield client, records
        await asyncio.sleep(0.3)  # the last acknowledgement


def mixed(tag: str, count: int) -> list[PlannedRequest]:
    """Four kinds of requests, streamed and not, shared prefixes, every tenth one aborted.

    The aborted ones last: chunks may reach a client bunched, and after the token it leaves at the
    engine goes on until it has noticed.
    """
    plan = []
    for number in range(count):
        chat, long_out = number % 2 == 0, number % 4 < 2
        cut = 4 if number % 10 == 9 else None
        plan.append(
            PlannedRequest(
                request_id=f"{tag}{number}",
                request_type=TYPES[number % 4],
                headers={"x-tenant": f"tenant-{number % 3}"},
                prompt=SHARED + f"# question {number}\n" * (1 + number % 3),
                endpoint=CHAT if chat else COMPLETIONS,
                max_tokens=LASTING_TOKENS if cut else 40 if long_out else 6,
                streaming=number % 3 != 1 or cut is not None,
                abort_after_token_events=cut,
            )
        )
    return plan


def response_id(seen: Observed) -> str:
    prefix = "chatcmpl-" if seen.endpoint == CHAT else "cmpl-"
    return seen.response_id or prefix + seen.request_id


async def test_every_request_is_one_record_with_the_clients_numbers(server: VllmServer) -> None:
    async with reading(server) as (client, records):
        observed = await run_closed(server.url, mixed("m", 80), 12)
        await until(lambda: len(records) >= len(observed))
    by_id = {r.request_id: r for r in records}
    assert len(records) == len(by_id) == len(observed) == 80
    assert client.dropped_total == client.refused_total == client.garbage_total == 0
    assert client.hello is not None
    assert client.hello.missing == ()
    assert client.hello.received_by == client.received_by == "http"
    assert client.hello.ttft_by == client.ttft_by == "http"
    assert client.hello.boot_values["async_scheduling"] is server.asynchronous
    wrong = []
    for seen in observed:
        record = by_id[response_id(seen)]
        assert record.refuse_impossible(time.time()) == []
        assert record.outcome is seen.outcome
        assert record.model_name == server.model_name
        assert record.streaming is seen.streaming
        assert record.endpoint == seen.endpoint
        assert record.request_type_hint == seen.request_type == TYPES[int(seen.request_id[1:]) % 4]
        assert record.tenant == f"tenant-{int(seen.request_id[1:]) % 3}"
        if seen.outcome is Outcome.CLIENT_DISCONNECT:
            assert record.phase is Phase.DECODE
            assert record.output_tokens is not None
            assert record.output_tokens >= 4
            continue
        theirs = (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens)
        if (record.prompt_tokens, record.output_tokens, record.cached_tokens) != theirs:
            wrong.append((record, theirs))
    assert wrong == []
    assert sum(r.cached_tokens or 0 for r in records) > 0
    assert sum(s.outcome is Outcome.CLIENT_DISCONNECT for s in observed) == 8


async def test_times_agree_with_the_clients_clock(server: VllmServer) -> None:
    """In rounds, as in truth.py: what else the machine does passes, a wrong clock stays."""
    async with reading(server) as (_, records):
        for number in range(3):
            del records[:]
            medians = await one_round(server, records, f"e2et{number}-")
            print(f"round {number}: {medians}")
            if medians.agree():
                return
    assert medians.same_clocks()


async def one_round(server: VllmServer, records: list[RequestRecord], tag: str) -> Medians:
    """Ours and the client's median of TTFT and of TPOT; each record is no later than the client."""
    plan = [
        PlannedRequest(request_id=f"{tag}{n}", prompt=f"# {tag}{n}\n" + SHARED, max_tokens=30)
        for n in range(30)
    ]
    observed = await run_closed(server.url, plan, 2, keep_alive=True)
    await until(lambda: len(records) >= 30)
    by_id = {r.request_id: r for r in records}
    for seen in observed:
        record = by_id[response_id(seen)]
        # Our clock starts when the server's socket has the request, as the kernel tells it in its
        # ticks, and stops when the HTTP server gets the chunk.
        assert record.time_to_first_token_seconds is not None
        assert record.e2e_seconds is not None
        assert seen.ttft_seconds is not None
        assert seen.e2e_seconds is not None
        assert seen.started_unix_seconds is not None
        assert record.received_unix_seconds is not None
        assert seen.started_unix_seconds <= record.received_unix_seconds + LONGEST_TICK_SECONDS
        assert record.time_to_first_token_seconds <= seen.ttft_seconds + 0.01
        assert record.e2e_seconds <= seen.e2e_seconds + 0.01
    return Medians.of([asdict(record) for record in records], observed)


async def test_samples_and_lists_of_prompts_are_one_record(server: VllmServer) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return server.post_json(path, {"model": server.model_name, "ignore_eos": True, **body})

    async with reading(server) as (_, records):
        chat = await asyncio.to_thread(
            post,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 5},
        )
        listed = await asyncio.to_thread(
            post, "/v1/completions", {"prompt": ["one", "two and", "three"], "max_tokens": 4}
        )
        await until(lambda: len(records) >= 2)
    assert [r.request_id for r in records] == [chat["id"], listed["id"]]
    for record, answer in zip(records, (chat, listed), strict=True):
        assert record.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert record.output_tokens == answer["usage"]["completion_tokens"]


def phases(client: StatsClient) -> dict[str, str]:
    return {one["request_id"]: one["phase"] for one in client.in_flight}


async def test_requests_in_flight_and_aborts_before_the_first_token(server: VllmServer) -> None:
    """One request a step (the batch limit is 1), so the second one waits; then both clients leave.

    Each step of this test waits for the one before to be seen. It needs the first request to last
    for some polls of the list (0.1 s each) and two disconnects: below 1 s, and the request lasts
    LONGEST_TOKENS steps of the engine. The one that waits leaves first: were the running one gone
    before it, it would run.
    """
    first = PlannedRequest(request_id="running", prompt="x", max_tokens=LONGEST_TOKENS)
    second = PlannedRequest(request_id="waiting", prompt="y", max_tokens=LONGEST_TOKENS)
    leave_first, leave_second = asyncio.Event(), asyncio.Event()
    async with (
        knobs(server) as control,
        reading(server) as (client, records),
    ):
        await control.set({"max_running_requests": 1})
        async with background(run_open(server.url, [first], stop=leave_first)) as running:
            await until(lambda: phases(client) == {"cmpl-running": "decode"})
            async with background(run_open(server.url, [second], stop=leave_second)) as waiting:
                both = {"cmpl-running": "decode", "cmpl-waiting": "queued"}
                await state_with(control, lambda state: state.waiting == 1)
                await asyncio.sleep(0.3)  # the API server hears it with the next step; then polls
                await until(lambda: phases(client) == both)
                assert client.in_flight_total == 2
                leave_second.set()
                await waiting
                await until(lambda: len(records) == 1)
            leave_first.set()
            await running
            await until(lambda: len(records) == 2)
        await until(lambda: not client.in_flight)
    found = {r.request_id: r for r in records}
    assert found["cmpl-waiting"].phase is Phase.QUEUED
    assert found["cmpl-waiting"].time_to_first_token_seconds is None
    assert found["cmpl-running"].phase is Phase.DECODE
    assert {r.outcome for r in records} == {Outcome.CLIENT_DISCONNECT}


async def test_a_sidecar_that_was_away_misses_nothing(server: VllmServer) -> None:
    async with reading(server) as (_, records):
        await run_closed(server.url, mixed("before", 8), 4)
        await until(lambda: len(records) >= 8)
    await run_closed(server.url, mixed("away", 12), 4)
    async with reading(server) as (_, later):
        await until(lambda: len(later) >= 12)
        await run_closed(server.url, mixed("after", 4), 4)
        await until(lambda: len(later) >= 16)
    ids = [r.request_id for r in (*records, *later)]
    assert len(ids) == len(set(ids)) == 24


HOLDER = """
import asyncio, pathlib, sys
from servoscope.exporters.knobs.client import KnobClient
async def main():
    client = await KnobClient.connect(pathlib.Path(sys.argv[1]))
    await client.lease("killed", 5.0)
    await client.set({"chunk_tokens": 256})
    print("set", flush=True)
    while True:
        await asyncio.sleep(1)
        await client.renew()
asyncio.run(main())
"""


async def test_chunk_goes_down_live_and_back_when_the_client_is_killed(
    server: VllmServer,
) -> None:
    stop = asyncio.Event()
    plan = [
        PlannedRequest(request_id=f"c{n}", prompt=f"# {n}\n" + LONG * 70, max_tokens=8)
        for n in range(4000)  # the end comes by ``stop``
    ]
    async with (
        knobs(server, lease=False) as watcher,
        background(run_closed(server.url, plan, 6, stop=stop)) as load,
    ):
        await watcher.get()
        before = await full_step(watcher)
        holder = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOLDER, str(watcher.path), stdout=subprocess.PIPE
        )
        try:
            assert holder.stdout is not None
            assert await asyncio.wait_for(holder.stdout.readline(), 20) == b"set\n"
            steps = (await watcher.get()).steps  # and forget the step that was under way
            await asyncio.sleep(7)  # longer than the lease: it is renewed
            state = await watcher.get()
            lowered = state.step_tokens_max
            assert state.steps > steps
        finally:
            holder.kill()
            await holder.wait()
        deadline = time.monotonic() + 20  # the lease is 5 s
        while (await watcher.get()).knobs["chunk_tokens"].value != 2048:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        after = await full_step(watcher)
        assert not load.done()
        stop.set()
        observed = await load
        print(f"largest step {before} -> {lowered} -> {after}")
        assert 0 < lowered <= 256
        assert before == after == 2048
        assert (await watcher.get()).faults == 0
    assert all(s.outcome in (Outcome.LENGTH, Outcome.CANCELLED) for s in observed if s.sent), {
        s.detail for s in observed
    }
    assert any(s.outcome is Outcome.LENGTH for s in observed)


async def full_step(client: KnobClient) -> int:
    """The largest step so far, as soon as there was a full one, or after a minute."""
    largest, deadline = 0, time.monotonic() + 60
    while largest < 2048 and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        largest = max(largest, (await client.get()).step_tokens_max)
    return largest


async def outputs(server: VllmServer, salt: str) -> list[str]:
    """Digests of greedy answers to long prompts; the salt keeps the runs' KV caches apart."""

    def one(number: int) -> str:
        answer = server.post_json(
            "/v1/completions",
            {
                "model": server.model_name,
                "prompt": f"# file {number}\n" + LONG * 40,
                "max_tokens": 24,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
                "cache_salt": salt,
            },
        )
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == 24
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return hashlib.sha256(repr(tokens).encode()).hexdigest()

    return await asyncio.gather(*(asyncio.to_thread(one, number) for number in range(6)))


async def test_outputs_are_the_same_with_any_chunk(server: VllmServer) -> None:
    unset = await outputs(server, "unset")
    async with knobs(server) as control:
        await control.set({"chunk_tokens": 256})
        await control.get()
        chunked = await outputs(server, "chunked")
        assert (await control.get()).step_tokens_max == 256
        await control.set({"chunk_tokens": 2048, "long_prefill_threshold_tokens": 128})
        limited = await outputs(server, "limited")
    assert unset == chunked == limited
    assert len(set(unset)) > 1  # the model listens to its prompt


async def test_fewer_slots_under_load_lose_nothing(server: VllmServer) -> None:
    plan = [PlannedRequest(request_id=f"s{n}", prompt="go", max_tokens=250) for n in range(40)]
    async with (
        knobs(server) as control,
        background(run_closed(server.url, plan, 20)) as load,
    ):
        await state_with(control, lambda state: state.running >= 10)
        await control.set({"max_running_requests": 2})
        with pytest.raises(
            KnobRefused, match="max_running_requests=65: above the value at boot, 64"
        ):
            await control.set({"max_running_requests": 65})
        # Those that ran have ended, and others wait: the limit holds them, not a lack of load.
        await state_with(control, lambda state: state.running == 2 and state.waiting >= 10)
        await control.set({"max_running_requests": 64})
        assert {s.outcome for s in await load} == {Outcome.LENGTH}


async def test_batch_window_gathers_arrivals(server: VllmServer) -> None:
    plan = [
        PlannedRequest(request_id=f"w{n}", prompt="go", max_tokens=4, arrival_seconds=n * 0.03)
        for n in range(4)
    ]
    async with knobs(server) as control:
        await control.set({"batch_window_seconds": 1.0, "batch_window_min_requests": 4})
        before = await control.get()
        observed = await run_open(server.url, plan)
        after = await control.get()
    assert {s.outcome for s in observed} == {Outcome.LENGTH}
    assert after.held_steps > before.held_steps
    assert after.step_tokens_max == sum(s.prompt_tokens or 0 for s in observed)  # one batch


async def test_scheduler_cpu_is_measured_and_ours_apart(server: VllmServer) -> None:
    async with knobs(server, lease=False) as control:
        state = await control.get()
    assert state.steps > 100
    assert 0 < state.plugin_cpu_seconds < state.scheduler_cpu_seconds
    each = 1e6 / (state.steps + state.empty_steps)
    print(
        f"schedule() {state.scheduler_cpu_seconds * each:.1f} us, "
        f"ours {state.plugin_cpu_seconds * each:.1f} us a step"
    )


def test_the_knobs_command_under_load(server: VllmServer, tmp_path: Path) -> None:
    """Through the CLI and the sidecar's control API, as an operator does it."""
    with Product(
        home=tmp_path,
        engine_url=server.url,
        run_dir=server.run_dir,
        config="sidecar: {warmup_seconds: 0, scrape_interval_seconds: 1}\n",
        collector_port=9675,
    ) as product:

        def chunk() -> float:
            return product.metrics().total("servoscope_knob_value", knob="chunk_tokens")

        def lower() -> None:
            # Six requests run when it is set; what follows in this load is not looked at.
            done = product.run("knobs", server.url, "set", "chunk_tokens=256")
            assert done.returncode == 0, done.stderr
            assert "applied: chunk_tokens=256" in done.stdout

        wait_for(lambda: product.source_states()["plugin"] in ("ok", "idle"), 30)
        unset = load(product, long_prompts(6, "unset"))
        turning = load(product, long_prompts(6, "turning"), during=lower)
        lowered = load(product, long_prompts(6, "lowered"))
        refused = product.run("knobs", server.url, "set", "chunk_tokens=100000")
        audit = (tmp_path / "state" / "audit.jsonl").read_text().splitlines()
        product.kill_sidecar()
        killed = time.monotonic()
        product.start_sidecar()
        wait_for(lambda: chunk() == 2048, 40, pause=0.5)
        back = time.monotonic() - killed
        after = load(product, long_prompts(1, "after"))
    print(
        f"largest step {unset.step_tokens_max:g} -> {lowered.step_tokens_max:g} -> "
        f"{after.step_tokens_max:g}; back {back:.1f} s after the sidecar was killed"
    )
    assert unset.failed == turning.failed == lowered.failed == after.failed == {}
    assert unset.digests == turning.digests == lowered.digests
    assert unset.digests[:1] == after.digests
    assert len(set(unset.digests)) > 1  # the model listens to its prompt
    assert unset.step_tokens_max == after.step_tokens_max == 2048
    assert 0 < lowered.step_tokens_max <= 256
    assert refused.returncode == 1
    assert "chunk_tokens" in refused.stderr
    assert any("chunk_tokens" in line for line in audit)
    assert back <= 35


def test_only_this_engines_sockets_are_left(server: VllmServer) -> None:
    """Under AsyncScheduler the engine before it was killed: its sockets must be gone."""
    pids = set(server.pids())
    left = sorted(server.run_dir.glob("*.sock"))
    assert len(left) == 2
    assert all(int(path.name.split("-")[1].split(".")[0]) in pids for path in left)

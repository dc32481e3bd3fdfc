"""SGLang's knobs on real servers: two tensor-parallel ranks, and one with the native delayer.

What the scheduler does is read from its own log (one line a prefill batch) and from the socket of
every rank, not from the attribute that was set.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from engines.background import background
from engines.product import Product, wait_for
from engines.sglang_cpu import SglangServer
from servoscope.exporters.knobs.client import KnobClient, KnobRefused, find_knob_sockets
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.records import Outcome
from servoscope.exporters.sglang.knobs import SglangKnobGroup
from servoscope.lab.client import Observed, PlannedRequest, run_closed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BOOT_CHUNK = 2048
PREFILL = re.compile(r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+)")
#: Answers that outlast what is done beside them; they are left before their end.
LASTING_TOKENS = 3000


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[SglangServer]:
    """TP=2, mixed chunk at boot."""
    words = ["--chunked-prefill-size", str(BOOT_CHUNK), "--enable-mixed-chunk"]
    with SglangServer(tp=2, knobs=True, args=words) as running:
        yield running


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """TP=1 with SGLang's own delayer: it waits up to 0.4 s for half as many as are running."""
    words = [
        "--chunked-prefill-size", str(BOOT_CHUNK), "--enable-prefill-delayer",
        "--prefill-delayer-queue-min-ratio", "0.5", "--prefill-delayer-max-delay-ms", "400",
        "--prefill-delayer-max-delay-passes", "100000",
    ]  # fmt: skip
    with SglangServer(
        knobs=True, args=words, run_dir=tmp_path_factory.mktemp("servoscope-run")
    ) as running:
        yield running


def sockets(server: SglangServer) -> list[Path]:
    return find_knob_sockets([server.run_dir], server.pids())


@asynccontextmanager
async def leased(server: SglangServer) -> AsyncIterator[SglangKnobGroup]:
    """The knobs of a server; boot values come back with the end of the block."""
    group = await SglangKnobGroup.connect(sockets(server))

    async def renew() -> None:
        while True:
            await asyncio.sleep(5)
            await group.renew()

    try:
        await group.lease("test", 30)
        async with background(renew()):
            yield group
    finally:
        try:
            await group.release()
            await shows(server, chunk_tokens=BOOT_CHUNK)
        finally:
            await group.aclose()


@asynccontextmanager
async def running(server: SglangServer, tag: str, count: int) -> AsyncIterator[None]:
    """``count`` requests decode as long as the block lasts; their prefills are in the log."""
    plan = prompts(tag, count, 60, LASTING_TOKENS)
    logged = Prefills(server)
    async with background(run_closed(server.url, plan, count)):
        deadline = time.monotonic() + 60
        while (
            sum(requests for requests, _ in logged.seen()) < count
            or (await each_rank(server))[0].running < count
        ):
            assert time.monotonic() < deadline, "they do not run"
            await asyncio.sleep(0.05)
        yield


async def each_rank(server: SglangServer) -> list[KnobState]:
    """What every scheduler process says of itself, in the order of ranks."""
    states = []
    for path in sockets(server):
        client = await KnobClient.connect(path)
        states.append((client.hello.boot_values["tp_rank"], await client.get()))
        await client.aclose()
    return [state for _, state in sorted(states, key=lambda pair: pair[0])]


async def shows(server: SglangServer, seconds: float = 10.0, **wanted: float) -> list[KnobState]:
    """Wait until every rank shows these values."""
    deadline = time.monotonic() + seconds
    while True:
        states = await each_rank(server)
        if all(s.knobs[name].value == v for s in states for name, v in wanted.items()):
            return states
        assert time.monotonic() < deadline, [s.knobs for s in states]
        await asyncio.sleep(0.05)


class Prefills:
    """Prefill batches that the engine logs in a block: (requests, tokens) of each."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self._begin = len(server.log_path.read_text(errors="replace"))

    def seen(self) -> list[tuple[int, int]]:
        text = self._server.log_path.read_text(errors="replace")[self._begin :]
        return [(int(found[1]), int(found[2])) for found in PREFILL.finditer(text)]

    def largest(self) -> int:
        return max((tokens for _, tokens in self.seen()), default=0)


def prompts(tag: str, count: int, tokens: int = 3000, output: int = 24) -> list[PlannedRequest]:
    """Prompts of token ids that share no prefix: no cache shortens them."""
    seed = sum(tag.encode()) * 131
    return [
        PlannedRequest(
            request_id=f"{tag}-{n}",
            prompt=tuple(10 + (seed + 7919 * n + 31 * i * (n + 1)) % 1900 for i in range(tokens)),
            max_tokens=output,
        )
        for n in range(count)
    ]


def failed(seen: Sequence[Observed]) -> Mapping[str, str]:
    return {o.request_id: o.detail for o in seen if o.outcome is not Outcome.LENGTH}


async def test_chunk_changes_on_every_rank_in_the_middle_of_a_load(two_ranks: SglangServer) -> None:
    async with leased(two_ranks) as group:
        batches = Prefills(two_ranks)
        boot = await run_closed(two_ranks.url, prompts("boot", 2), 2)
        assert failed(boot) == {}
        assert batches.largest() == BOOT_CHUNK

        load = asyncio.ensure_future(run_closed(two_ranks.url, prompts("move", 6), 3))
        try:
            for chunk in (512, 1024, 256, 512):
                (applied,) = await group.set({"chunk_tokens": chunk})
                assert applied["chunk_tokens"] == chunk
                # Mixed chunk is on: no interval needs to go with it.
                assert applied["prefill_decode_interval"] == 0
                for state in await each_rank(two_ranks):
                    assert state.knobs["chunk_tokens"].value == chunk
        finally:
            moved = await load
        assert failed(moved) == {}

        two_ranks.get_text("/flush_cache?timeout=10")  # the same prompts, computed anew
        batches = Prefills(two_ranks)
        clients = [await KnobClient.connect(path) for path in sockets(two_ranks)]
        for client in clients:
            await client.get()
        small = await run_closed(two_ranks.url, prompts("boot", 2), 2)
        largest = [(await client.get()).step_tokens_max for client in clients]
        for client in clients:
            await client.aclose()
    assert failed(small) == {}
    assert [o.text_sha256 for o in small] == [o.text_sha256 for o in boot]
    assert batches.largest() == 512
    print(f"largest step of each rank at chunk 512: {largest}")
    assert len(largest) == 2
    assert all(value <= 512 for value in largest)
    assert largest[0] == largest[1]
    again = Prefills(two_ranks)
    assert failed(await run_closed(two_ranks.url, prompts("again", 1), 1)) == {}
    assert again.largest() == BOOT_CHUNK


async def test_without_mixed_chunk_the_interval_comes_with_it(two_ranks: SglangServer) -> None:
    async with leased(two_ranks) as group:
        (applied,) = await group.set({"mixed_chunk": 0, "chunk_tokens": 512})
        assert applied["prefill_decode_interval"] == 1
        with pytest.raises(KnobRefused, match="make decode wait longer"):
            await group.set({"prefill_decode_interval": 0})
        told = two_ranks.get_json("/server_info")["internal_states"][0]["servoscope_knobs"]
        assert (told["chunk_tokens"], told["prefill_decode_interval"]) == (512, 1)
        for state in await each_rank(two_ranks):
            assert state.knobs["mixed_chunk"].value == 0
            assert state.knobs["prefill_decode_interval"].value == 1
        assert failed(await run_closed(two_ranks.url, prompts("interval", 4), 4)) == {}
        (applied,) = await group.set({"chunk_tokens": BOOT_CHUNK})
        assert applied["prefill_decode_interval"] == 0
    await shows(two_ranks, mixed_chunk=1, prefill_decode_interval=0)


async def test_running_requests_are_capped_by_the_engines_own_key(
    two_ranks: SglangServer,
) -> None:
    async with leased(two_ranks) as group:
        await group.set({"max_running_requests": 2})
        begin = len(two_ranks.log_path.read_text(errors="replace"))
        assert failed(await run_closed(two_ranks.url, prompts("cap", 8, 50, 40), 8)) == {}
        text = two_ranks.log_path.read_text(errors="replace")[begin:]
    running = [int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", text)]
    assert running
    assert max(running) == 2


async def arrive(server: SglangServer, tag: str, count: int, gap: float) -> list[Observed]:
    """Requests one after the other, ``gap`` seconds apart."""

    async def one(number: int, plan: PlannedRequest) -> Observed:
        await asyncio.sleep(number * gap)
        return (await run_closed(server.url, [plan], 1))[0]

    return list(
        await asyncio.gather(*(one(n, p) for n, p in enumerate(prompts(tag, count, 60, 4))))
    )


async def test_a_window_gathers_on_two_ranks_and_does_not_lock_them(
    two_ranks: SglangServer,
) -> None:
    async def batches_of(tag: str) -> list[int]:
        seen = Prefills(two_ranks)
        assert failed(await arrive(two_ranks, tag, 8, 0.02)) == {}
        return [requests for requests, _ in seen.seen()]

    apart = await batches_of("apart")
    async with leased(two_ranks) as group:
        await group.set({"batch_window_seconds": 0.5})
        idle = await batches_of("idle")
        await group.set({"batch_window_min_requests": 4})
        fours = await batches_of("fours")
        await group.set({"batch_window_min_requests": 0})
        async with running(two_ranks, "busy", 2):
            busy = await batches_of("during")
        held = [state.held_steps for state in await each_rank(two_ranks)]
    print(f"requests a batch: {apart} without, {idle} idle, {fours} at four, {busy} while busy")
    print(f"steps held by each rank: {held}")
    assert sum(apart) == sum(idle) == sum(fours) == sum(busy) == 8
    assert len(apart) > len(idle)
    assert len(idle) <= 2
    assert max(fours) >= 4
    assert len(apart) > len(busy)
    assert held[0] == held[1] > 0


async def test_a_lease_that_nobody_renews_ends_on_every_rank_of_an_idle_engine(
    two_ranks: SglangServer,
) -> None:
    group = await SglangKnobGroup.connect(sockets(two_ranks))
    await group.lease("gone", 2.0)
    await group.set({"chunk_tokens": 256, "batch_window_seconds": 0.2})
    await group.aclose()  # no release: as if it had been killed
    assert [s.knobs["chunk_tokens"].value for s in await each_rank(two_ranks)] == [256, 256]
    begin = time.monotonic()
    states = await shows(two_ranks, chunk_tokens=BOOT_CHUNK, batch_window_seconds=0)
    print(f"back at boot values {time.monotonic() - begin:.1f} s later, of a lease of 2 s")
    assert [state.lease_owner for state in states] == [None, None]
    assert failed(await run_closed(two_ranks.url, prompts("after", 2, 200, 4), 2)) == {}


async def gaps(server: SglangServer, tag: str) -> float:
    """Longest gap between two tokens of two running requests while four long prompts arrive."""
    arrived = asyncio.Event()

    async def decoding(session: aiohttp.ClientSession, plan: PlannedRequest) -> float:
        longest, before, number = 0.0, 0.0, 0
        body = plan.body() | {"model": server.model_name}
        async with session.post(f"{server.url}{plan.endpoint}", json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                number += 1
                if number > 20:  # decoding, alone
                    arrived.set()
                    longest = max(longest, now - before)
                before = now
        return longest

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        two = [
            asyncio.ensure_future(decoding(session, plan))
            for plan in prompts(f"{tag}-run", 2, 100, 400)
        ]
        await arrived.wait()
        seen = await run_closed(server.url, prompts(f"{tag}-long", 4, 3000, 4), 4)
        assert failed(seen) == {}
        return max(await asyncio.gather(*two))


async def test_long_prompts_stop_decode_for_less_time_at_a_smaller_chunk(
    one_rank: SglangServer,
) -> None:
    """The set does what it is for; each figure is the median of three rounds."""
    found: dict[int, list[float]] = {BOOT_CHUNK: [], 512: []}
    async with leased(one_rank) as group:
        for number in range(3):
            for chunk, measured in found.items():
                (applied,) = await group.set({"chunk_tokens": chunk})
                assert applied["prefill_decode_interval"] == (chunk < BOOT_CHUNK)
                batches = Prefills(one_rank)
                measured.append(await gaps(one_rank, f"gap{chunk}x{number}"))
                assert batches.largest() == chunk
    shown = {chunk: [round(x * 1e3) for x in measured] for chunk, measured in found.items()}
    print(f"longest gap in decode, ms: {shown}")
    assert statistics.median(found[512]) < statistics.median(found[BOOT_CHUNK])


async def test_the_window_is_the_engines_own_where_it_has_one(one_rank: SglangServer) -> None:
    """How long it holds a prefill is read from its own histogram: passes, on whatever machine."""

    async def passes_waited(tag: str) -> tuple[float, float]:
        # Eight are running: the delayer waits for four more, 0.4 s at most, and no longer than
        # none of its last sixteen attempts had more than waits now.
        before = await delayer_waits(one_rank)
        async with running(one_rank, f"{tag}-run", 8):
            assert failed(await arrive(one_rank, tag, 6, 0.04)) == {}
        after = await delayer_waits(one_rank)
        return after[0] - before[0], after[1] - before[1]

    async with leased(one_rank) as group:
        (state,) = await group.get()
        assert state.knobs["batch_window_seconds"].value == 0.4
        waited, prefills = await passes_waited("native")
        with pytest.raises(KnobRefused, match="queue-min-ratio"):
            await group.set({"batch_window_min_requests": 3})
        with pytest.raises(KnobRefused, match="above the value at boot"):
            await group.set({"batch_window_seconds": 0.5})
        await group.set({"batch_window_seconds": 0})
        waited_at_0, prefills_at_0 = await passes_waited("none")
    print(
        f"passes that prefills waited: {waited:.0f} ({prefills:.0f} prefills) with the delayer, "
        f"{waited_at_0:.0f} ({prefills_at_0:.0f}) at 0 s"
    )
    assert waited > prefills > 0
    assert prefills_at_0 >= waited_at_0  # at 0 s the pass after the first one lets it go


async def delayer_waits(server: SglangServer) -> tuple[float, float]:
    """Passes that the delayer has held prefills for, and how many of them it has let go."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        text = await answer.text()
    name = "sglang:prefill_delayer_wait_forward_passes"
    found = [
        sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(start))
        for start in (f"{name}_sum", f"{name}_count")
    ]
    return found[0], found[1]


def test_a_killed_sidecar_leaves_boot_values_behind(one_rank: SglangServer, tmp_path: Path) -> None:
    product = Product(
        tmp_path / "product", one_rank.url, one_rank.run_dir, sidecar_words=("--tap", "off"),
        collector_port=9675,
    )  # fmt: skip
    with product:
        answer = product.run("knobs", one_rank.url, "set", "chunk_tokens=512", "--json")
        assert answer.returncode == 0, answer.stderr
        told = json.loads(answer.stdout)
        assert told["applied"] == {"chunk_tokens": 512, "prefill_decode_interval": 1}
        assert product.run("knobs", one_rank.url, "set", "chunk_tokens=4096").returncode != 0
        knobs = {knob["name"]: knob for knob in product.inspect()["knobs"]}
        assert knobs["chunk_tokens"]["value"] == 512
        assert knobs["chunk_tokens"]["mode"] == "live"
        wait_for(
            lambda: product.metrics().total("servoscope_knob_value", knob="chunk_tokens") == 512, 15
        )
        product.kill_sidecar()
    begin = time.monotonic()
    asyncio.run(shows(one_rank, 35, chunk_tokens=BOOT_CHUNK, prefill_decode_interval=0))
    print(f"back at boot values {time.monotonic() - begin:.1f} s after kill -9, engine idle")

"""Tap and relay on real engines against the client's own truth. Figures are printed (``-s``)."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from engines.vllm_cpu import VllmServer
from servoscope.exporters.records import Outcome, RequestRecord
from servoscope.lab.client import CHAT, COMPLETIONS, Limits, PlannedRequest, run_closed
from servoscope.lab.embedded.server import EmbeddedEngine
from servoscope.lab.request import Observed
from servoscope.sidecar.relay.source import RelaySource
from servoscope.sidecar.tap.source import TapSource

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.timeout(600)]
TOLERANCE_RATIO, TOLERANCE_SECONDS = 0.10, 0.010


@dataclass
class Seen:
    """One run, seen three times."""

    client: list[Observed]
    tap: list[RequestRecord]
    relay: list[RequestRecord]
    drops: dict[str, int]


def plan(count: int, model: str, *, aborts: bool = False) -> list[PlannedRequest]:
    """Chat and completions, one in five not streamed; every eighth leaves in decode if asked."""
    chance = random.Random(7)
    return [
        PlannedRequest(
            request_id=f"wire-{n}",
            prompt=f"the quick brown fox {chance.randrange(1000)} " * chance.choice([3, 20]),
            endpoint=CHAT if n % 3 == 0 else COMPLETIONS,
            max_tokens=chance.choice([8, 32, 64]),
            streaming=aborts or n % 5 != 4,
            request_type="chat",
            model=model,
            abort_after_token_events=2 if aborts and n % 8 == 0 else None,
        )
        for n in range(count)
    ]


def watch(port: int, requests: Sequence[PlannedRequest], concurrency: int) -> Seen:
    """Send through the relay, with the tap in front of the engine."""

    async def run() -> Seen:
        tap, relay = TapSource("127.0.0.1", port), RelaySource(upstream_port=port)
        tap_records: list[RequestRecord] = []
        relay_records: list[RequestRecord] = []
        tasks = [
            asyncio.create_task(tap.run(tap_records.append)),
            asyncio.create_task(relay.run(relay_records.append)),
        ]
        await asyncio.wait_for(relay.listening.wait(), 5)
        assert await asyncio.to_thread(tap.capturing.wait, 5)
        url = f"http://127.0.0.1:{relay.port}"
        client = await run_closed(url, requests, concurrency, limits=Limits(total_seconds=300))
        for _ in range(100):  # a capture block is handed over after 50 ms at the latest
            await asyncio.sleep(0.05)
            if len(tap_records) == len(relay_records) == len(client):
                break
        drops = dict(tap.drops()) | dict(relay.drops())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Seen(client, tap_records, relay_records, drops)

    return asyncio.run(run())


def p50(values: Sequence[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def check_numbers(seen: Seen, count: int) -> None:
    """Count and tokens exact; TTFT and TPOT p50 within 10 % or 10 ms."""
    assert len(seen.client) == count
    assert seen.drops == {}
    for name, records in (("tap", seen.tap), ("relay", seen.relay)):
        assert len(records) == count
        by_id = {record.request_id: record for record in records}
        assert len(by_id) == count
        for truth in seen.client:
            record = by_id[str(truth.response_id)]
            assert record.outcome is truth.outcome
            assert record.streaming is truth.streaming
            assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (
                truth.prompt_tokens,
                truth.cached_tokens,
                truth.output_tokens,
            )
            assert record.request_type_hint == "chat"
        streamed = [truth for truth in seen.client if truth.streaming]
        for what, ours, theirs in (
            (
                "TTFT",
                [r.time_to_first_token_seconds for r in records if r.streaming],
                [t.ttft_seconds for t in streamed],
            ),
            (
                "TPOT",
                [r.time_per_output_token_seconds for r in records if r.streaming],
                [t.tpot_seconds for t in streamed],
            ),
            (
                "e2e",
                [r.e2e_seconds for r in records],
                [t.e2e_seconds for t in seen.client],
            ),
        ):
            mine, truth_p50 = p50(ours), p50(theirs)
            print(f"{name} {what} p50 {mine * 1e3:.2f} ms, client {truth_p50 * 1e3:.2f} ms")
            assert abs(mine - truth_p50) <= max(TOLERANCE_RATIO * truth_p50, TOLERANCE_SECONDS)


def check_aborts(seen: Seen) -> None:
    """Clients that left in decode are disconnects with a first token; the rest is complete."""
    truth = Counter(observed.outcome for observed in seen.client)
    assert truth[Outcome.CLIENT_DISCONNECT] > 0
    ids = {o.response_id for o in seen.client if o.outcome is Outcome.CLIENT_DISCONNECT}
    for records in (seen.tap, seen.relay):
        assert len(records) == len(seen.client)
        left = [r for r in records if r.outcome is Outcome.CLIENT_DISCONNECT]
        assert {r.request_id for r in left} <= ids
        assert all(r.time_to_first_token_seconds is not None for r in left)
        # An answer that was sent whole before the client closed is complete, and rightly so.
        assert {r.outcome for r in records} <= {
            Outcome.CLIENT_DISCONNECT,
            Outcome.LENGTH,
            Outcome.COMPLETED,
        }
        assert len(left) >= len(ids) // 2


@pytest.fixture(scope="module")
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(
        tmp_path_factory.mktemp("embedded"), slots=2, context_tokens=4096
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmServer]:
    with VllmServer(plugin=False, env={"SERVOSCOPE_DISABLE": "1"}) as server:
        yield server


def test_llamacpp_numbers(llamacpp: EmbeddedEngine) -> None:
    check_numbers(watch(llamacpp.port, plan(75, "embedded-tiny"), 4), 75)


def test_llamacpp_clients_that_leave(llamacpp: EmbeddedEngine) -> None:
    check_aborts(watch(llamacpp.port, plan(40, "embedded-tiny", aborts=True), 3))


def test_llamacpp_queue_time(tmp_path: Path) -> None:
    """With one slot requests are served one after the other: what is not queue cannot overlap."""
    with EmbeddedEngine(tmp_path, slots=1, context_tokens=4096) as engine:
        seen = watch(engine.port, plan(24, "embedded-tiny"), 4)
    assert len(seen.tap) == 24
    spans = []
    for record in seen.tap:
        assert record.received_unix_seconds is not None
        assert record.queue_seconds is not None
        assert record.finished_unix_seconds is not None
        spans.append(
            (
                record.received_unix_seconds + record.queue_seconds,
                record.finished_unix_seconds,
                record.queue_seconds,
            )
        )
    spans.sort()
    overlaps = [max(0.0, a[1] - b[0]) for a, b in pairwise(spans)]
    busy = sum(end - begin for begin, end, _ in spans)
    print(f"queue p50 {p50([s[2] for s in spans]) * 1e3:.1f} ms, overlap {sum(overlaps):.3f} s")
    assert sum(overlaps) <= 0.1 * busy
    assert max(s[2] for s in spans) > 0.0


def test_vllm_without_anything_of_ours(vllm: VllmServer) -> None:
    check_numbers(watch(vllm.port, plan(60, vllm.model_name), 4), 60)


def test_vllm_clients_that_leave(vllm: VllmServer) -> None:
    check_aborts(watch(vllm.port, plan(40, vllm.model_name, aborts=True), 4))

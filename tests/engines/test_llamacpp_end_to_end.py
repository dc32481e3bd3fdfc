"""A real llama.cpp of our own start, by relay and by tap, against the client's truth.

One engine serves all tests: four slots and more clients than that, so that requests wait. Tokens
are those of ``usage``. Figures are printed (`pytest -s` shows them).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from engines.process import free_port
from engines.product import Product, Series, fetch, wait_for
from engines.truth import TOLERANCE_SECONDS, Medians, close
from servoscope.exporters.llamacpp.parse import Parser
from servoscope.exporters.records import Outcome
from servoscope.lab.client import Limits, run_closed
from servoscope.lab.embedded.server import EmbeddedEngine
from servoscope.lab.plan import FOUR_TYPES, mixed_plan
from servoscope.lab.request import Observed, PlannedRequest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
REQUESTS = 200
SLOTS, CONCURRENCY = 4, 6
#: Half as long as the lab's, so that two runs of 200 take less than a minute.
TYPES = [
    replace(
        one,
        prompt_tokens=(one.prompt_tokens[0] // 2, one.prompt_tokens[1] // 2),
        output_tokens=(one.output_tokens[0] // 2, one.output_tokens[1] // 2),
    )
    for one in FOUR_TYPES
]
CONFIG = "sidecar: {warmup_seconds: 0, scrape_interval_seconds: 1, %s}\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(tmp_path_factory.mktemp("embedded"), slots=SLOTS) as engine:
        run(engine.url, plan(8, seed=1), CONCURRENCY)
        yield engine


def plan(count: int, seed: int) -> list[PlannedRequest]:
    """Four types with shared prefixes, all streamed."""
    return mixed_plan(count, seed=seed, types=TYPES, request_id_prefix=f"e2e{seed}")


def run(url: str, requests: Sequence[PlannedRequest], concurrency: int) -> list[Observed]:
    """Send them, each on a connection of its own: this server closes those that are kept."""
    return asyncio.run(run_closed(url, requests, concurrency, limits=Limits(total_seconds=120)))


def counter(engine: EmbeddedEngine, name: str) -> float:
    return Series.read(fetch(f"{engine.url}/metrics")).total(f"llamacpp:{name}")


@dataclass
class Waiting:
    """How long requests waited in sum, by the engine's own list of those that wait for a slot.

    The number of them is read many times a second; its integral is the sum of their waits. It
    leaves out how long a request waits for the step in hand to end: only then it is listed.
    """

    engine: EmbeddedEngine
    seconds: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last, before = time.monotonic(), 0.0
        while not self._ended.wait(0.01):
            waiting = counter(self.engine, "requests_deferred")
            now = time.monotonic()
            self.seconds += (now - last) * (before + waiting) / 2
            last, before = now, waiting


@dataclass(frozen=True, slots=True)
class Round:
    """Ours and the client's of the same requests. Queues are means, in seconds.

    The client's queue is its TTFT less the engine's prefill; ours is the whole request less the
    engine's prefill and decode. ``own`` is our TTFT less that prefill.
    """

    times: Medians
    queue: float
    clients: float
    own: float

    @classmethod
    def of(
        cls, rows: Sequence[dict[str, Any]], seen: Sequence[Observed], prefill_seconds: float
    ) -> Self:
        """``prefill_seconds``: of all these requests together."""

        def mean(values: Iterable[float | None]) -> float:
            return sum(value or 0.0 for value in values) / len(seen)

        prefill = prefill_seconds / len(seen)
        return cls(
            Medians.of(rows, seen),
            mean(row["queue_seconds"] for row in rows),
            mean(one.ttft_seconds for one in seen) - prefill,
            mean(row["time_to_first_token_seconds"] for row in rows) - prefill,
        )

    def agrees(self) -> bool:
        """TTFT, TPOT and queue within 10 % or 10 ms."""
        return self.times.agree() and close(self.queue, self.clients)

    def same_clocks(self) -> bool:
        """What holds on a busy machine too, where requests wait before any server can see them."""
        return self.times.same_clocks() and close(self.queue, self.own)

    def __str__(self) -> str:
        """For a report."""
        return (
            f"{self.times}, queue mean {self.queue * 1e3:.1f} ms (client "
            f"{self.clients * 1e3:.1f}, our TTFT less prefill {self.own * 1e3:.1f})"
        )


def rows_of(product: Product, seen: Sequence[Observed]) -> list[dict[str, Any]]:
    """The collector's records of these requests, under the ids that the client gave them."""
    names = {one.response_id: one.request_id for one in seen}
    url = f"{product.collector_url}/api/v1/records/recent?limit=500"

    def read() -> list[dict[str, Any]] | None:
        found = [r for r in json.loads(fetch(url))["records"] if r["request_id"] in names]
        return found if len(found) >= len(seen) else None

    found: list[dict[str, Any]] = wait_for(read, 30)
    return [{**row, "request_id": names[row["request_id"]]} for row in found]


def check(engine: EmbeddedEngine, product: Product, url: str, source: str, seeds: range) -> None:
    """Every request once and with its own numbers; times within 10 % or 10 ms."""
    before = product.metrics()
    cached0, new0 = (
        counter(engine, "prompt_tokens_cached_total"),
        counter(engine, "prompt_tokens_total"),
    )
    spent0 = counter(engine, "prompt_seconds_total")

    def gained(name: str, **labels: str) -> float:
        full = f"servoscope_{name}"
        return product.metrics().total(full, **labels) - before.total(full, **labels)

    began = time.monotonic()
    with Waiting(engine) as waiting:
        seen = run(url, plan(REQUESTS, seeds[0]), CONCURRENCY)
    took = time.monotonic() - began
    assert {o.outcome for o in seen} == {Outcome.LENGTH}
    wait_for(lambda: gained("requests_total") >= REQUESTS, 30)
    rows = rows_of(product, seen)
    time.sleep(1)  # nothing may be added any more
    assert len(rows) == REQUESTS
    assert gained("requests_total") == gained("requests_total", source=source) == REQUESTS
    by_id = {row["request_id"]: row for row in rows}
    assert len(by_id) == REQUESTS
    for one in seen:
        row = by_id[one.request_id]
        for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
            assert row[name] == getattr(one, name), (name, one.request_id)
        assert (row["streaming"], row["request_type"]) == (True, one.request_type)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        assert gained(f"{name}_sum") == sum(getattr(o, name) or 0 for o in seen), name
    assert {row["request_type"] for row in rows} == {one.name for one in TYPES}
    hits = counter(engine, "prompt_tokens_cached_total") - cached0
    asked = counter(engine, "prompt_tokens_total") - new0 + hits
    assert hits == sum(o.cached_tokens or 0 for o in seen) > 0
    assert asked == sum(o.prompt_tokens or 0 for o in seen)

    # Prompts that share a step share its time in the engine's sum, and each has all of it in ours.
    prefill = gained("prefill_seconds_sum")
    assert 0.5 * prefill < counter(engine, "prompt_seconds_total") - spent0 <= 1.001 * prefill
    queue = gained("queue_seconds_sum") / REQUESTS
    listed = waiting.seconds / REQUESTS
    rounds = [Round.of(rows, seen, prefill)]
    for seed in seeds[1:]:
        if rounds[-1].agrees():
            break
        prefill = gained("prefill_seconds_sum")
        more = run(url, plan(60, seed), CONCURRENCY)
        found = rows_of(product, more)
        time.sleep(1)
        rounds.append(Round.of(found, more, gained("prefill_seconds_sum") - prefill))
    print(
        f"\n{source}, {REQUESTS} requests in {took:.1f} s: KV hit {hits / asked:.4f}, "
        f"engine's list of those that wait {listed * 1e3:.1f} ms"
    )
    print("\n".join(f"{source}, round {n}: {one}" for n, one in enumerate(rounds)))
    assert 0.25 * queue < listed <= queue + TOLERANCE_SECONDS
    assert rounds[-1].agrees() or rounds[-1].same_clocks()


def test_the_relay_gives_the_clients_numbers(engine: EmbeddedEngine, tmp_path: Path) -> None:
    relay = f"127.0.0.1:{free_port()}"
    with Product(
        home=tmp_path, engine_url=engine.url, run_dir=tmp_path / "run",
        config=CONFIG % f'tap: off, relay: "{relay}"',
    ) as product:  # fmt: skip
        assert product.inspect()["requests_from"] == "relay"
        check(engine, product, f"http://{relay}", "relay", range(21, 24))
        _load_and_boot_values_are_told(engine, product)
    _a_second_reader_takes_a_window_and_nothing_that_is_read(engine)


@pytest.mark.root
def test_the_tap_gives_the_clients_numbers(engine: EmbeddedEngine, tmp_path: Path) -> None:
    with Product(
        home=tmp_path, engine_url=engine.url, run_dir=tmp_path / "run",
        config=CONFIG % "tap: on",
    ) as product:  # fmt: skip
        wait_for(lambda: product.source_states()["tap"] in ("ok", "idle"), 20)
        check(engine, product, engine.url, "tap", range(31, 34))


def test_a_server_that_sleeps_is_left_asleep(tmp_path: Path) -> None:
    """Scraped and asked for its load every second, it falls asleep and stays so."""
    with (
        EmbeddedEngine(tmp_path / "engine", sleep_idle_seconds=2) as engine,
        Product(
            home=tmp_path, engine_url=engine.url, run_dir=tmp_path / "run",
            config=CONFIG % "tap: off",
        ) as product,
    ):  # fmt: skip

        def sleeps() -> bool:
            return bool(json.loads(fetch(f"{engine.url}/props"))["is_sleeping"])

        def loads() -> Any:
            return next(s for s in product.inspect()["sources"] if s["source"] == "loads")

        lasting = [
            PlannedRequest(request_id=f"s{n}", prompt=f"{n}" + "x" * 400, max_tokens=1500)
            for n in range(6)
        ]
        worker = threading.Thread(target=run, args=(engine.url, lasting, 1))
        worker.start()
        try:
            wait_for(lambda: "1 of 4 slots" in loads()["detail"], 20)  # asked while it works
        finally:
            worker.join()
        wait_for(sleeps, 30)
        wait_for(lambda: "sleeps" in loads()["detail"], 20)
        read = product.metrics().total("servoscope_source_last_success_timestamp_seconds")
        time.sleep(3)  # some scrapes and questions later
        assert sleeps()
        later = product.metrics().total("servoscope_source_last_success_timestamp_seconds")
        assert later > read  # it was scraped meanwhile
        assert loads()["state"] == "idle"
        (seen,) = run(engine.url, plan(1, seed=95), 1)
        assert seen.outcome is Outcome.LENGTH


def _load_and_boot_values_are_told(engine: EmbeddedEngine, product: Product) -> None:
    told = product.inspect()
    knobs = {knob["name"]: knob for knob in told["knobs"]}
    found = {name: (knob["value"], knob["mode"]) for name, knob in knobs.items()}
    assert found == {
        "chunk_tokens": (512, "restart"), "ubatch_tokens": (256, "restart"),
        "max_running_requests": (SLOTS, "restart"),
    }  # fmt: skip
    assert product.source_states()["loads"] == "idle"
    lasting = [
        PlannedRequest(request_id=f"long-{n}", prompt="x" * 400, max_tokens=1500) for n in range(2)
    ]
    worker = threading.Thread(target=run, args=(engine.url, lasting, 2))
    worker.start()
    try:
        usage = wait_for(
            lambda: (
                (now := product.metrics()).total("servoscope_running") == 2
                and now.total("servoscope_kv_usage_ratio")
            ),
            20,
        )
        loads = next(s for s in product.inspect()["sources"] if s["source"] == "loads")
        assert loads["state"] == "ok"
        assert loads["detail"] == f"2 of {SLOTS} slots of 2048 tokens work"
        assert 2 * 400 / (SLOTS * 2048) <= usage <= 2 * 1900 / (SLOTS * 2048)
    finally:
        worker.join()
    wait_for(lambda: product.metrics().total("servoscope_running") == 0, 20)
    assert "no knob of llamacpp can be set live" in told["knobs_why"]


def _a_second_reader_takes_a_window_and_nothing_that_is_read(engine: EmbeddedEngine) -> None:
    """No sidecar reads now. What a first reader saw in the window gauges a second one does not."""
    run(engine.url, plan(4, seed=90), 4)
    parser = Parser()
    first, second = (fetch(f"{engine.url}/metrics") for _ in range(2))
    windows = [
        [Series.read(text).total(f"llamacpp:{name}_tokens_seconds") for text in (first, second)]
        for name in ("prompt", "predicted")
    ]
    assert all(before > 0 and after == 0 for before, after in windows)
    assert parser.parse(first).readings == parser.parse(second).readings

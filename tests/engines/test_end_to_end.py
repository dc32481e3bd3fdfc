"""A real vLLM, our plug-in, sidecar and collector, against the client's own truth.

One engine serves all tests of this module, in order: numbers, overview, restart. Figures are
printed (`pytest -s` or the report of a failure shows them).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.page_timing import (
    Load,
    breach_and_recover,
    product_with_spec,
    rule_files,
    running,
)
from engines.product import Product, Series, fetch, wait_for
from engines.truth import Medians, plan, records, rounds_until_agreement, run
from engines.vllm_cpu import ONE_CORE, ROOT, VllmServer
from servoscope.alerts.alertmanager import compile_alertmanager
from servoscope.dashboards.live import prometheus_reader, silent_queries
from servoscope.exporters.records import Outcome
from servoscope.lab.request import Observed, PlannedRequest
from stack.harness import Stack, speed_up
from stack.test_page_end_to_end import FAST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
REQUESTS = 300
#: Budget burn looks back 5 min and more, whatever the settings: it has its own tests.
FASTEST = replace(FAST, burn_minimum_events=10**6, burn_minimum_bad=10**6)
LASTING_TOKENS = 4000  # with the longest prompt below the model's length, 8192
#: What a machine without a GPU and an engine without speculative decoding cannot show.
NOT_HERE: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmServer]:
    with VllmServer(knobs=True, env=ONE_CORE) as server:
        yield server


@pytest.fixture(scope="module")
def product(engine: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # No warm-up: the engine is younger than a minute, and its requests shall count.
    with Product(
        home=tmp_path_factory.mktemp("product"),
        engine_url=engine.url,
        run_dir=engine.run_dir,
        config="sidecar: {warmup_seconds: 0, scrape_interval_seconds: 1}\n",
    ) as product:
        wait_for(lambda: product.source_states()["plugin"] in ("ok", "idle"), 30)
        yield product


@pytest.fixture(scope="module")
def stack(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prometheus with the committed rules, scraping from the first request on."""
    with Stack(tmp_path_factory.mktemp("stack"), scrape_seconds=5) as stack:
        stack.set_targets("servoscope-sidecar", [product.sidecar_url.removeprefix("http://")])
        yield stack


def _wait_for_scrape(engine: VllmServer, product: Product) -> None:
    """Until the sidecar has read all that the engine has counted (it was there from the start)."""
    wait_for(
        lambda: (
            product.metrics().total("servoscope_kv_query_tokens_total")
            == _engine_counter(engine, "vllm:prefix_cache_queries_total")
        ),
        60,
        pause=0.5,
    )


def _engine_counter(engine: VllmServer, name: str) -> float:
    return Series.read(fetch(f"{engine.url}/metrics")).total(name)


@pytest.mark.usefixtures("stack")
def test_every_request_is_counted_and_true(engine: VllmServer, product: Product) -> None:
    run(engine.url, plan(8, seed=1))  # engine warm-up: kernels, allocator
    wait_for(lambda: product.metrics().total("servoscope_requests_total") == 8, 30)
    _wait_for_scrape(engine, product)
    before = product.metrics()
    hits_before = _engine_counter(engine, "vllm:prefix_cache_hits_total")
    queries_before = _engine_counter(engine, "vllm:prefix_cache_queries_total")

    seen = run(engine.url, plan(REQUESTS, seed=2))
    assert all(o.outcome in (Outcome.COMPLETED, Outcome.LENGTH) for o in seen)
    wait_for(lambda: product.metrics().total("servoscope_requests_total") >= 8 + REQUESTS, 60)
    _wait_for_scrape(engine, product)
    time.sleep(2)  # nothing may be added any more
    after = product.metrics()

    def added(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    hits = _engine_counter(engine, "vllm:prefix_cache_hits_total") - hits_before
    queries = _engine_counter(engine, "vllm:prefix_cache_queries_total") - queries_before
    ours = added("servoscope_kv_hit_tokens_total") / added("servoscope_kv_query_tokens_total")
    rows = records(product, seed=2)
    assert len(rows) == REQUESTS
    medians = Medians.of(rows, seen)
    print(f"\n{REQUESTS} requests: {medians}, KV hit {ours:.4f} (engine {hits / queries:.4f})")
    assert added("servoscope_requests_total", source="plugin") == REQUESTS
    assert added("servoscope_requests_total") == REQUESTS
    assert added("servoscope_prompt_tokens_sum") == sum(o.prompt_tokens or 0 for o in seen)
    assert added("servoscope_output_tokens_sum") == sum(o.output_tokens or 0 for o in seen)
    assert added("servoscope_cached_tokens_sum") == sum(o.cached_tokens or 0 for o in seen)
    assert hits > 0
    assert ours == hits / queries
    assert {r["request_type"] for r in rows} == {"chat", "summarise", "generate", "rag"}  # headers
    assert {r["streaming"] for r in rows} == {True}
    rounds = rounds_until_agreement(product, medians, (21, 22))
    print("\n".join(f"round {n}: {one}" for n, one in enumerate(rounds)))
    assert rounds[-1].agree() or rounds[-1].same_clocks()


def test_overview_adds_up(engine: VllmServer, product: Product) -> None:
    rows = product.overview()["rows"]
    counted = sum(r["requests"] for r in rows)
    assert counted == product.metrics().total("servoscope_requests_total")
    for row in rows:
        assert row["gpu_model"] == "none"
        assert row["model_name"] == "tiny"
        assert row["time_to_first_token_seconds"]["p50"] > 0
        assert row["queue_seconds"]["p99"] >= 0
        assert 0 <= row["kv_hit_ratio"] <= 1
        assert 0 <= row["goodput_ratio"] <= 1
    assert len({r["model_version"] for r in rows}) == 1
    assert rows[0]["model_version"] != "unknown"


def test_disconnects_are_counted_once(engine: VllmServer, product: Product) -> None:
    before = product.metrics().values("servoscope_requests_total", "outcome")
    # Those that leave had asked for so much that no engine is done by then, however fast.
    requests = [
        replace(one, max_tokens=LASTING_TOKENS) if leaves(one) else one
        for one in plan(40, seed=3, abort_share=0.5)
    ]
    seen = run(engine.url, requests)
    left = sum(o.outcome in (Outcome.CANCELLED, Outcome.CLIENT_DISCONNECT) for o in seen)
    assert left == sum(map(leaves, requests)) >= 10

    def counted() -> dict[str, float]:
        now = product.metrics().values("servoscope_requests_total", "outcome")
        return {k: v - before.get(k, 0) for k, v in now.items() if v != before.get(k, 0)}

    wait_for(lambda: sum(counted().values()) >= 40 - left, 30)
    time.sleep(3)
    found = counted()
    print(f"\nclient: {left} left of 40; ours: {found}")
    # A client may leave before vLLM has seen the request at all: then nobody in the engine knows.
    assert 40 - left <= sum(found.values()) <= 40
    assert found.get("length", 0) + found.get("completed", 0) == 40 - left
    # Half of them leave after a token: those the engine knew.
    assert left // 2 <= found.get("client_disconnect", 0) <= left
    assert product.metrics().total("servoscope_requests_in_flight") == 0


def leaves(planned: PlannedRequest) -> bool:
    return planned.abort_after_seconds is not None or planned.abort_after_token_events is not None


@pytest.mark.stack
def test_every_query_of_the_dashboard_has_data(product: Product, stack: Stack) -> None:
    """Over everything that the tests above did, with the committed rules."""
    dashboard = json.loads((ROOT / "dashboards" / "generated" / "overview.json").read_text())
    quiet = silent_queries(
        prometheus_reader(stack.prometheus_url),
        dashboard,
        end=time.time(),
        window_seconds=600,
        rate_interval="30s",
        ignore=NOT_HERE,
    )
    assert [str(query) for query in quiet] == []
    assert stack.rule_errors() == []


@pytest.mark.stack
def test_a_breach_pages_and_resolves(engine: VllmServer, product: Product, tmp_path: Path) -> None:
    """Windows divided by ten; ``python -m engines.page_timing`` measures the committed ones."""
    directory = tmp_path / "stack"
    directory.mkdir()
    product.end_sidecar()  # one sidecar a server
    try:
        with (
            product_with_spec(tmp_path / "product", engine) as second,
            Stack(
                directory,
                rule_files=rule_files(tmp_path, FASTEST),
                alertmanager_yaml=speed_up(compile_alertmanager()),
                scrape_seconds=1,
            ) as fast,
            running(Load(engine.url)) as load,
        ):
            timing = breach_and_recover(fast, second, load, settle=8, breach=20, patience=120)
            print(
                f"\nwindows divided by ten: page after {timing.page_seconds:.1f} s, resolved "
                f"{timing.resolve_seconds:.1f} s after the end"
            )
            assert "ServoscopeLatencyFarOverSlo" in timing.pages[0].alert_names()
            assert timing.pages[-1].status == "resolved"
            assert fast.rule_errors() == []
    finally:
        product.start_sidecar()


def test_engine_killed_and_restarted_under_load(engine: VllmServer, product: Product) -> None:
    first = product.metrics()
    lost: list[Observed] = []

    def load() -> None:
        # More than any engine serves before it is killed; after that each fails at once.
        lost.extend(run(engine.url, plan(1000, seed=6), concurrency=8))

    worker = threading.Thread(target=load)
    worker.start()
    try:
        wait_for(lambda: _engine_counter(engine, "vllm:num_requests_running") >= 4, 30)
    finally:
        engine.kill()
        worker.join()
    assert any(o.outcome is Outcome.ERROR for o in lost)
    wait_for(lambda: product.metrics().total("servoscope_engine_up") == 0, 30)
    engine.start()
    wait_for(lambda: product.metrics().total("servoscope_engine_up") == 1, 30)
    wait_for(lambda: product.source_states()["plugin"] in ("ok", "idle"), 30)
    before = product.metrics()
    assert before.total("servoscope_engine_restarts_total") == 1
    seen = run(engine.url, plan(16, seed=7))
    assert len(seen) == 16
    wait_for(
        lambda: (
            product.metrics().total("servoscope_requests_total")
            >= before.total("servoscope_requests_total") + 16
        ),
        30,
    )
    last = product.metrics()
    went_back = [
        (name, labels, value)
        for name, labels, value in first.samples
        if name.startswith("servoscope_")
        and name.endswith(("_total", "_count", "_sum", "_bucket"))
        and (now := _same(last, name, labels)) is not None
        and now < value
    ]
    assert went_back == []


def _same(series: Series, name: str, labels: Any) -> float | None:
    return next((v for n, found, v in series.samples if n == name and found == labels), None)

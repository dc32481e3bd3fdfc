"""A real vLLM that was started with nothing of ours in it: the tap, and without the right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engines.product import Product, wait_for
from engines.truth import Medians, plan, records, rounds_until_agreement, run
from engines.vllm_cpu import VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.mark.root
def test_tap_gives_the_clients_numbers(plain_vllm: VllmServer, tmp_path: Path) -> None:
    run(plain_vllm.url, plan(8, seed=11))
    with Product(
        home=tmp_path,
        engine_url=plain_vllm.url,
        run_dir=tmp_path / "run",
        config="sidecar: {warmup_seconds: 0, scrape_interval_seconds: 1}\n",
    ) as product:
        assert product.source_states()["tap"] in ("ok", "idle")
        seen = run(plain_vllm.url, plan(100, seed=12))
        wait_for(lambda: product.metrics().total("servoscope_requests_total") >= 100, 30)
        time.sleep(2)
        metrics = product.metrics()
        assert metrics.total("servoscope_requests_total", source="tap") == 100
        assert metrics.total("servoscope_requests_total") == 100
        rows = records(product, seed=12)
        assert len(rows) == 100
        assert {r["request_type"] for r in rows} == {"chat", "summarise", "generate", "rag"}
        rounds = rounds_until_agreement(product, Medians.of(rows, seen), (14, 15))
        print("\n".join(f"tap, round {n}: {one}" for n, one in enumerate(rounds)))
        assert rounds[-1].agree() or rounds[-1].same_clocks()


def test_without_the_right_it_says_so_and_falls_back(
    plain_vllm: VllmServer, tmp_path: Path
) -> None:
    """Root without CAP_NET_RAW: the same as any user without it."""
    with Product(
        home=tmp_path,
        engine_url=plain_vllm.url,
        run_dir=tmp_path / "run",
        config="sidecar: {warmup_seconds: 0, scrape_interval_seconds: 1}\n",
        wrapper=("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw"),
    ) as product:
        run(plain_vllm.url, plan(12, seed=13))
        wait_for(lambda: product.metrics().total("servoscope_requests_total") >= 12, 30)
        sources = {s["source"]: s for s in product.inspect()["sources"]}
        assert sources["tap"]["state"] == "off"
        assert "CAP_NET_RAW" in sources["tap"]["detail"]
        assert "setcap cap_net_raw" in sources["tap"]["detail"]
        assert sources["scrape"]["state"] in ("ok", "idle")
        metrics = product.metrics()
        assert metrics.total("servoscope_requests_total", source="scrape") == 12
        reported = metrics.total(
            "servoscope_reported_time_to_first_token_seconds_count", source="scrape"
        )
        assert reported >= 12
        assert metrics.total("servoscope_slo_total") == 0  # buckets decide no objective
        text = product.run("inspect", plain_vllm.url).stdout
        assert "CAP_NET_RAW" in text

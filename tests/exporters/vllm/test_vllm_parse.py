"""vLLM's own texts, and texts as vLLM must not write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from servoscope.exporters.records import EngineSample
from servoscope.exporters.vllm.names import TABLE
from servoscope.exporters.vllm.parse import Parser

CAPTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "vllm" / "0.32.0"
LOADED = (CAPTURES / "metrics_under_load.txt").read_text(encoding="utf-8")
RANK = 'engine="0",model_name="m"'


def oracle(text: str) -> dict[str, float]:
    """Sum of every sample by name, as prometheus_client reads it."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def kept(sample: EngineSample, name: str, **labels: str) -> list[float]:
    wanted = set(labels.items())
    return [r.value for r in sample.readings if r.name == name and wanted <= set(r.labels)]


@pytest.mark.parametrize("capture", ["metrics.txt", "metrics_under_load.txt"])
def test_a_real_text_gives_what_prometheus_client_reads_in_it(capture: str) -> None:
    text = (CAPTURES / capture).read_text(encoding="utf-8")
    sample = Parser("0.32.0").parse(text)
    expected = oracle(text)
    assert (sample.absent, sample.unknown, sample.refused) == ((), (), ())
    for signal, name in {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "kv_query_tokens_total": "prefix_cache_queries_total",
        "preemptions_total": "num_preemptions_total",
        "engine_prompt_tokens_total": "prompt_tokens_total",
        "engine_generated_tokens_total": "generation_tokens_total",
        "engine_requests_total": "request_success_total",
    }.items():
        assert sample.total(signal) == expected[f"vllm:{name}"], signal
    assert sample.peak("kv_usage_ratio") == expected["vllm:kv_cache_usage_perc"]
    assert kept(sample, "kv_hit_tokens_total", kv_tier="device") == [
        expected["vllm:prefix_cache_hits_total"]
    ]
    assert kept(sample, "kv_hit_tokens_total", kv_tier="external") == [0]
    labels = [dict(r.labels) for r in sample.readings if r.name == "engine_requests_total"]
    reasons = {found["finish_reason"] for found in labels}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    histograms = {h.name: h for h in sample.histograms}
    for signal, name in {
        "reported_time_to_first_token_seconds": "time_to_first_token_seconds",
        "reported_time_per_output_token_seconds": "request_time_per_output_token_seconds",
        "reported_inter_token_latency_seconds": "inter_token_latency_seconds",
        "reported_queue_seconds": "request_queue_time_seconds",
        "reported_e2e_seconds": "e2e_request_latency_seconds",
    }.items():
        found = histograms.pop(signal)
        assert found.count == expected[f"vllm:{name}_count"]
        assert found.sum == expected[f"vllm:{name}_sum"]
        assert sum(count for _, count in found.buckets) == expected[f"vllm:{name}_bucket"]
        assert found.labels == (("model_name", "tiny"), ("rank", "0"))
    assert histograms == {}


def test_counts_of_two_ranks_are_summed_and_ratios_are_not() -> None:
    second = [
        line.replace('engine="0"', 'engine="1"')
        for line in LOADED.splitlines()
        if not line.startswith("#") and 'engine="0"' in line
    ]
    second = [
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.9' if "kv_cache_usage" in x else x
        for x in second
    ]
    one, two = Parser().parse(LOADED), Parser().parse(LOADED + "\n".join(second) + "\n")
    for signal in ("running", "engine_generated_tokens_total", "engine_requests_total"):
        assert two.total(signal) == 2 * (one.total(signal) or 0)
    assert two.peak("kv_usage_ratio") == 0.9
    assert {dict(r.labels).get("rank") for r in two.readings} == {"0", "1"}
    assert len(two.histograms) == 2 * len(one.histograms)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
@pytest.mark.parametrize("name", ["generation_tokens_total", "num_requests_running"])
def test_impossible_numbers_are_refused_by_name(name: str, value: str) -> None:
    before = f"vllm:{name}{{{RANK}}}"
    sample = Parser("0.32.0").parse(
        f"{before} {value}\nvllm:prompt_tokens_total{{{RANK}}} 5\n"
        f'vllm:{name}{{engine="1",model_name="m"}} 7\n'
    )
    signal = "running" if "running" in name else "engine_generated_tokens_total"
    assert [r.name for r in sample.refused] == [f"vllm:{name}"]
    assert kept(sample, signal) == [7]
    assert sample.total("engine_prompt_tokens_total") == 5
    assert signal not in sample.absent


def test_both_names_of_the_kv_cache_are_one_signal() -> None:
    text = (
        f"vllm:gpu_cache_usage_perc{{{RANK}}} 0.5\nvllm:kv_cache_usage_perc{{{RANK}}} 0.5\n"
        f"vllm:gpu_prefix_cache_queries_total{{{RANK}}} 90\n"
        f"vllm:prefix_cache_queries_total{{{RANK}}} 90\n"
        f"vllm:gpu_prefix_cache_hits_total{{{RANK}}} 30\n"
        f"vllm:prefix_cache_hits_total{{{RANK}}} 30\n"
    )
    sample = Parser("0.10.2").parse(text)
    assert sample.total("kv_usage_ratio") == 0.5
    assert sample.total("kv_query_tokens_total") == 90
    assert sample.total("kv_hit_tokens_total") == 30


def test_more_hits_than_queries_are_no_hit_rate() -> None:
    def text(hits: int, external: int) -> str:
        return (
            f"vllm:prefix_cache_queries_total{{{RANK}}} 100\n"
            f"vllm:prefix_cache_hits_total{{{RANK}}} {hits}\n"
            f"vllm:external_prefix_cache_hits_total{{{RANK}}} {external}\n"
            'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 10\n'
            'vllm:prefix_cache_hits_total{engine="1",model_name="m"} 5\n'
        )

    assert Parser().parse(text(100, 40)).refused == ()
    sample = Parser().parse(text(101, 40))
    assert [(r.name, r.value, r.why) for r in sample.refused] == [
        ("kv_hit_tokens_total", "101.0", "more hits than the 100 queries")
    ]
    assert sorted(kept(sample, "kv_hit_tokens_total")) == [5, 40]
    assert sample.total("kv_query_tokens_total") == 110


def test_replicas_under_ray_are_put_together() -> None:
    def lines(replica: str, running: int, usage: float) -> str:
        labels = (
            f'Component="core_worker",NodeAddress="10.0.0.1",ReplicaId="{replica}",'
            f'SessionName="s",Version="2.48.0",WorkerId="w{replica}",engine="0",model_name="m"'
        )
        return (
            f"ray_vllm_num_requests_running{{{labels}}} {running}\n"
            f"ray_vllm_kv_cache_usage_perc{{{labels}}} {usage}\n"
            f"ray_vllm_generation_tokens_total{{{labels}}} {running * 10}\n"
        )

    sample = Parser().parse(lines("a", 3, 0.25) + lines("b", 4, 0.5))
    assert sample.total("running") == 7
    assert sample.total("engine_generated_tokens_total") == 70
    assert sample.peak("kv_usage_ratio") == 0.5
    assert sample.unknown == ()
    assert len(sample.readings) == 3


def test_an_empty_text_says_that_everything_is_absent() -> None:
    sample = Parser("0.32.0").parse("")
    assert sample.readings == ()
    assert sample.absent == TABLE.core


def test_a_text_cut_anywhere_gives_no_wrong_number() -> None:
    whole = {(r.name, r.labels): r.value for r in Parser().parse(LOADED).readings}
    for end in range(0, len(LOADED), 997):
        for reading in Parser().parse(LOADED[:end]).readings:
            assert whole[reading.name, reading.labels] == reading.value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_text_never_raises(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(LOADED.splitlines()), max_size=30))
    text = "\n".join(lines)
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.text(max_size=10) | st.sampled_from(['"', "{", "}", "\n", "\0", " NaN"]))
    sample = Parser("0.32.0").parse(text[:at] + damage + text[at:] + "\n")
    assert all(r.value >= 0 for r in sample.readings)
    assert sample.engine == "vllm"
    assert sample.version == "0.32.0"

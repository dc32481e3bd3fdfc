"""SGLang's own texts, its ranks, and the traps in its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from servoscope.exporters.records import EngineSample
from servoscope.exporters.sglang.parse import Parser

CAPTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "sglang" / "0.5.23"
LOADED = (CAPTURES / "metrics_loaded.txt").read_text(encoding="utf-8")
S = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="{pp}",tp_rank="{tp}"'


def read(*lines: str, version: str | None = "0.5.23") -> EngineSample:
    return Parser(version).parse("".join(line + "\n" for line in lines))


def scheduler(name: str, value: float, *, dp: int | None = None, tp: int = 0, pp: int = 0,
              more: str = "") -> str:  # fmt: skip
    labels = S.format(tp=tp, pp=pp) + (f',dp_rank="{dp}"' if dp is not None else "") + more
    return f"sglang:{name}{{{labels}}} {value}"


def queue_histogram(count: int, *, dp: int | None = None, tp: int = 0) -> list[str]:
    labels = S.format(tp=tp, pp=0) + (f',dp_rank="{dp}"' if dp is not None else "")
    return [
        f'sglang:queue_time_seconds_bucket{{{labels},le="0.1"}} {count // 2}',
        f'sglang:queue_time_seconds_bucket{{{labels},le="+Inf"}} {count}',
        f"sglang:queue_time_seconds_sum{{{labels}}} {count * 0.5}",
        f"sglang:queue_time_seconds_count{{{labels}}} {count}",
    ]


def oracle(text: str) -> dict[str, float]:
    """Sum of every sample by name, as prometheus_client reads it."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@pytest.mark.parametrize(
    "capture",
    ["metrics.txt", "metrics_baseline_1req.txt", "metrics_delayer.txt", "metrics_loaded.txt"],
)
def test_a_real_text_gives_what_prometheus_client_reads_in_it(capture: str) -> None:
    text = (CAPTURES / capture).read_text(encoding="utf-8")
    sample, expected = Parser("0.5.23").parse(text), oracle(text)
    assert sample.refused == ()
    for signal, name in {
        "running": "num_running_reqs",
        "waiting": "num_queue_reqs",
        "kv_usage_ratio": "full_token_usage",
        "kv_query_tokens_total": "prefill_effective_tokens_total",
        "engine_prompt_tokens_total": "prompt_tokens_total",
        "engine_generated_tokens_total": "generation_tokens_total",
        "engine_requests_total": "num_requests_total",
    }.items():
        assert sample.total(signal) == expected[f"sglang:{name}"], signal
    histograms = {h.name: h for h in sample.histograms}
    for signal, name in {
        "reported_time_to_first_token_seconds": "time_to_first_token_seconds",
        "reported_time_per_output_token_seconds": "request_time_per_output_token_seconds",
        "reported_inter_token_latency_seconds": "inter_token_latency_seconds",
        "reported_queue_seconds": "queue_time_seconds",
        "reported_e2e_seconds": "e2e_request_latency_seconds",
    }.items():
        if f"sglang:{name}_count" not in expected:
            assert signal in sample.absent
            continue
        found = histograms.pop(signal)
        assert found.count == expected[f"sglang:{name}_count"]
        assert found.sum == pytest.approx(expected[f"sglang:{name}_sum"])
        assert sum(count for _, count in found.buckets) == expected[f"sglang:{name}_bucket"]
        assert found.labels == (("model_name", "model"),)
    assert histograms == {}


def test_tokens_of_the_cache_are_those_of_the_prompts() -> None:
    sample = Parser("0.5.23").parse(LOADED)
    # Computed and found together are the prompts of all 90 requests.
    assert sample.total("kv_query_tokens_total") == sample.total("engine_prompt_tokens_total")
    assert {dict(r.labels)["kv_tier"]: r.value for r in sample.readings if "hit" in r.name} == {
        "device": 87, "host": 0, "storage": 0,
    }  # fmt: skip


def test_tensor_ranks_of_one_engine_are_one_engine() -> None:
    """With --enable-metrics-for-all-schedulers every tensor rank tells the same requests."""
    for ranks in (1, 2, 8):
        lines = [
            line
            for tp in range(ranks)
            for line in (
                scheduler("num_running_reqs", 5, tp=tp),
                scheduler("num_queue_reqs", 3, tp=tp),
                scheduler("full_token_usage", 0.25, tp=tp),
                scheduler("num_retracted_requests_total", 4, tp=tp),
                scheduler("prefill_effective_tokens_total", 60, tp=tp, more=',mode="input"'),
                scheduler("prefill_effective_tokens_total", 40, tp=tp, more=',mode="device_hit"'),
                *queue_histogram(10, tp=tp),
            )
        ]
        sample = read(*lines)
        assert sample.total("running") == 5
        assert sample.total("waiting") == 3
        assert sample.total("preemptions_total") == 4
        assert sample.total("kv_query_tokens_total") == 100
        assert sample.total("kv_hit_tokens_total") == 40
        assert sample.peak("kv_usage_ratio") == 0.25
        (queue,) = sample.histograms
        assert (queue.count, queue.sum) == (10, 5)
        assert sample.unknown == ()


def test_two_tensor_ranks_of_a_real_server_are_one_engine() -> None:
    """Captured at TP=2 with --enable-metrics-for-all-schedulers: 24 requests, each told twice."""
    text = (CAPTURES / "ranks" / "metrics.txt").read_text(encoding="utf-8")
    sample, told = Parser("0.5.23").parse(text), oracle(text)
    assert told["sglang:queue_time_seconds_count"] == 48
    (queue,) = [h for h in sample.histograms if h.name == "reported_queue_seconds"]
    assert queue.count == 24 == sample.total("engine_requests_total")
    assert told["sglang:prefill_effective_tokens_total"] == 2 * 2_614
    assert sample.total("kv_query_tokens_total") == 2_614
    assert sample.total("engine_prompt_tokens_total") == 2_614
    computed = told["sglang:realtime_tokens_total"] - 2 * 1_866  # without what was found
    assert sample.total("scheduled_tokens_total") == computed / 2
    assert (sample.unknown, sample.refused) == ((), ())


def test_replicas_have_requests_of_their_own() -> None:
    sample = read(
        scheduler("num_running_reqs", 5, dp=0),
        scheduler("num_running_reqs", 7, dp=1, tp=4),  # its first tensor rank is the engine's 4th
        scheduler("full_token_usage", 0.25, dp=0),
        scheduler("full_token_usage", 0.75, dp=1, tp=4),
        *queue_histogram(10, dp=0),
        *queue_histogram(4, dp=1, tp=4),
    )
    assert sample.total("running") == 12
    assert sample.peak("kv_usage_ratio") == 0.75
    assert {dict(r.labels)["rank"] for r in sample.readings} == {"0", "1"}
    assert sorted(h.count for h in sample.histograms) == [4, 10]


@settings(max_examples=100, deadline=None)
@given(
    values=st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)),
        st.integers(0, 50),
        min_size=1,
        max_size=18,
    ),
    data=st.data(),
)
def test_ranks_never_depend_on_their_order(
    values: dict[tuple[int, int, int], int], data: st.DataObject
) -> None:
    """Counts: summed over replicas, the largest within one. Ratios: the largest of all."""
    lines = [
        line
        for (dp, tp, pp), value in values.items()
        for line in (
            scheduler("num_running_reqs", value, dp=dp, tp=tp, pp=pp),
            scheduler("full_token_usage", value / 50, dp=dp, tp=tp, pp=pp),
        )
    ]
    sample = read(*data.draw(st.permutations(lines)))
    replicas = {dp for dp, _, _ in values}
    assert sample.total("running") == sum(
        max(v for (dp, _, _), v in values.items() if dp == replica) for replica in replicas
    )
    assert sample.peak("kv_usage_ratio") == max(values.values()) / 50


def test_a_rank_that_is_broken_does_not_hide_its_twin() -> None:
    broken = [line.replace("} 10", "} NaN") for line in queue_histogram(10, tp=1)]
    sample = read(
        scheduler("num_running_reqs", 5), "sglang:num_running_reqs" + '{tp_rank="1"} NaN',
        *queue_histogram(10), *broken,
    )  # fmt: skip
    assert sample.total("running") == 5
    assert [h.count for h in sample.histograms] == [10]
    assert [r.name for r in sample.refused] == [
        "sglang:num_running_reqs", "sglang:queue_time_seconds"
    ]  # fmt: skip


def test_priorities_are_parts_of_a_total_in_gauges_and_all_there_is_in_counters() -> None:
    sample = read(
        scheduler("num_running_reqs", 9, more=',priority=""'),
        scheduler("num_running_reqs", 4, more=',priority="0"'),
        scheduler("num_running_reqs", 5, more=',priority="10"'),
        scheduler("num_queue_reqs", 2, more=',priority="0"'),
        scheduler("num_queue_reqs", 2, more=',priority=""'),
        'sglang:num_requests_total{model_name="m",engine_type="unified",priority="0"} 3',
        'sglang:num_requests_total{model_name="m",engine_type="unified",priority="10"} 4',
    )
    assert sample.total("running") == 9
    assert sample.total("waiting") == 2
    assert sample.total("engine_requests_total") == 7
    assert sample.unknown == ()


def test_one_source_of_hits_counts_and_not_both() -> None:
    """Replicas have a rank, the HTTP process has none: the two must not be added up."""
    finished = (
        'sglang:prompt_tokens_total{model_name="m",engine_type="unified",is_streaming="true"} 90',
        'sglang:cached_tokens_total{model_name="m",engine_type="unified",cache_source="total"} 9',
    )
    computed = [
        scheduler("prefill_effective_tokens_total", value, dp=dp, more=f',mode="{mode}"')
        for dp in (0, 1)
        for mode, value in (("input", 30), ("device_hit", 15), ("host_hit", 5), ("storage_hit", 0))
    ]
    both, old = read(*finished, *computed), read(*finished, version="0.5.16")
    assert both.total("kv_query_tokens_total") == 100
    assert both.total("kv_hit_tokens_total") == 40
    assert old.total("kv_query_tokens_total") == 90
    assert [(r.value, dict(r.labels)["kv_tier"]) for r in old.readings if "hit" in r.name] == [
        (9, "any")
    ]


@pytest.mark.parametrize(
    ("labels", "tier"),
    [("", "any"), ('cache_source="total",', "any"), ('cache_source="device",', "device"),
     ('cache_source="host",', "host"), ('cache_source="storage",', "storage")],
)  # fmt: skip
def test_tiers_of_every_era(labels: str, tier: str) -> None:
    sample = read(f'sglang:cached_tokens_total{{{labels}model_name="m"}} 5')
    assert [dict(r.labels) for r in sample.readings] == [{"kv_tier": tier, "model_name": "m"}]
    assert sample.unknown == ()


def test_a_tier_nobody_knows_is_reported_and_not_guessed() -> None:
    sample = read(
        'sglang:cached_tokens_total{cache_source="tape",model_name="m"} 5',
        scheduler("realtime_tokens_total", 5, more=',mode="prefill_cache"'),
        scheduler("realtime_tokens_total", 5, more=',mode="replay"'),
    )
    assert sample.readings == ()
    assert sample.unknown == (
        'sglang:cached_tokens_total{cache_source="tape"}',
        'sglang:realtime_tokens_total{mode="replay"}',
    )


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_", "ray_sglang:", "ray_sglang_"])
@pytest.mark.parametrize(
    "labels",
    [
        'name="m"',
        'model_name="m"',
        'engine_type="unified",model_name="m"',
        'engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"',
        'dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"',
        'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"',
        'model_name="m",worker_addr="http://10.0.0.1:30000"',
        'ReplicaId="r1",WorkerId="w",engine_type="unified",model_name="m",tp_rank="0"',
    ],
)
def test_labels_and_prefixes_of_every_era(labels: str, prefix: str) -> None:
    sample = read(f"{prefix}num_running_reqs{{{labels}}} 4", version=None)
    assert sample.unknown == ()
    assert sample.total("running") == 4
    assert dict(sample.readings[0].labels)["model_name"] == "m"


def test_labels_of_the_operator_are_said_once_and_put_together() -> None:
    sample = Parser("0.5.23").parse(LOADED)
    assert sample.unknown == ("sglang:prompt_tokens_total{route}",)
    assert len([r for r in sample.readings if r.name == "engine_requests_total"]) == 1


def test_numbers_that_say_something_else_are_not_used() -> None:
    sample = read(
        scheduler("cache_hit_rate", 0.0),
        scheduler("utilization", 0.0),
        "sglang:fwd_occupancy{" + S.format(tp=0, pp=0) + "} NaN",
        scheduler("num_retracted_reqs", 3, more=',pid="77"'),
        'sglang:num_aborted_requests_total{model_name="m"} 2',
        'sglang:http_responses_total{endpoint="/v1/completions",method="POST",status_code="200"} 9',
    )
    assert (sample.readings, sample.unknown, sample.refused) == ((), (), ())


def test_a_hybrid_model_is_as_full_as_its_full_attention_cache() -> None:
    lines = [
        scheduler("token_usage", 0.9),  # the state pool: always nearly full
        scheduler("full_token_usage", 0.123),
        scheduler("swa_token_usage", 0.4),
        scheduler("mamba_usage", 0.9),
    ]
    assert read(*lines).peak("kv_usage_ratio") == 0.123
    assert read(lines[0], version="0.5.9").peak("kv_usage_ratio") == 0.9


def test_progress_within_a_request_is_in_the_scheduled_tokens() -> None:
    sample = read(
        scheduler("realtime_tokens_total", 100, more=',mode="prefill_compute"'),
        scheduler("realtime_tokens_total", 50, more=',mode="prefill_cache"'),
        scheduler("realtime_tokens_total", 20, more=',mode="decode"'),
    )
    assert sample.total("scheduled_tokens_total") == 120
    assert "engine_generated_tokens_total" in sample.absent


def test_more_hits_than_queries_are_no_hit_rate() -> None:
    sample = read(
        'sglang:prompt_tokens_total{model_name="m"} 10',
        'sglang:cached_tokens_total{model_name="m"} 11',
        version="0.5.3",
    )
    assert [(r.name, r.value, r.why) for r in sample.refused] == [
        ("kv_hit_tokens_total", "11.0", "more hits than the 10 queries")
    ]
    assert sample.total("kv_hit_tokens_total") is None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_text_never_raises(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(LOADED.splitlines()), max_size=30))
    text = "\n".join(lines)
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.text(max_size=10) | st.sampled_from(['"', "{", "}", "\n", "\0", " NaN"]))
    sample = Parser("0.5.23").parse(text[:at] + damage + text[at:] + "\n")
    assert all(r.value >= 0 for r in sample.readings)

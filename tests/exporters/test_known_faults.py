"""Faults that operators report in public, as far as reading an engine's own metrics is concerned.

The number in a test's name is that of the table in docs/engines.md: each is a test of the whole
kind. What concerns requests, rules or capture is tested where it is built.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from servoscope.exporters.catalog import Kind, metric
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.records import EngineSample
from servoscope.exporters.table import Table

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
TABLES = [parser_for(engine, None).table for engine in ENGINES]
EACH = pytest.mark.parametrize("table", TABLES, ids=lambda t: t.engine)


def read(engine: str, *lines: str, version: str | None = None) -> EngineSample:
    return parser_for(engine, version).parse("".join(line + "\n" for line in lines))


def capture(name: str) -> EngineSample:
    engine, version, _ = name.split("/")
    return parser_for(engine, version).parse((FIXTURES / name).read_text(encoding="utf-8"))


def by_label(sample: EngineSample, signal: str, label: str) -> dict[str, float]:
    return {dict(r.labels).get(label, ""): r.value for r in sample.readings if r.name == signal}


def test_fault_01_reasons_stay_apart_and_a_zero_is_a_zero() -> None:
    """vLLM counts no aborted stream: what it does count must not be melted into one number."""
    sample = capture("vllm/0.32.0/metrics_under_load.txt")
    found = by_label(sample, "engine_requests_total", "finish_reason")
    assert found == {"stop": 0, "length": 70, "abort": 0, "error": 0, "repetition": 0}
    # Its prompts count from their start, its requests from their end: no quotient of the two.
    assert sample.total("engine_prompt_tokens_total") != 0


def test_fault_02_a_request_of_sglang_has_no_reason_and_an_abort_is_not_added() -> None:
    sample = read(
        "sglang",
        'sglang:num_requests_total{model_name="m"} 10',
        'sglang:num_aborted_requests_total{model_name="m"} 4',
    )
    assert by_label(sample, "engine_requests_total", "finish_reason") == {"": 10}
    assert sample.unknown == ()


@EACH
def test_fault_03_no_engine_is_said_to_count_errors_that_it_does_not(table: Table) -> None:
    for line in table.lines:
        assert "finish_reason" not in dict(line.labels), line


def test_fault_04_each_histogram_has_the_events_that_the_engine_gave_it() -> None:
    histograms = {h.name: h for h in capture("vllm/0.32.0/metrics_under_load.txt").histograms}
    assert histograms["reported_time_to_first_token_seconds"].count == 78  # begun
    assert histograms["reported_e2e_seconds"].count == 70  # ended
    for h in histograms.values():
        assert h.buckets[-1] == (math.inf, h.count)


@EACH
def test_fault_06_08_09_10_an_engines_histogram_is_never_taken_for_ours(table: Table) -> None:
    """Its edges are coarse, its TPOT knows one-token answers, its TTFT those without a stream.

    So it is only ever published under a name that says whose it is, and no SLI is made of it.
    """
    for line in table.lines:
        if line.kind is Kind.HISTOGRAM:
            assert line.signal.startswith("reported_"), line
            assert metric(line.signal).part == "engine"
        else:
            assert metric(line.signal).part == "engine"


@pytest.mark.parametrize("name", ["vllm/0.32.0/metrics.txt", "sglang/0.5.23/metrics_loaded.txt"])
def test_fault_09_edges_stay_the_engines_own(name: str) -> None:
    text = (FIXTURES / name).read_text(encoding="utf-8")
    edges = {
        float(line.partition('le="')[2].partition('"')[0])
        for line in text.splitlines()
        if ":time_to_first_token_seconds_bucket" in line
    }
    (found,) = [
        h for h in capture(name).histograms if h.name == "reported_time_to_first_token_seconds"
    ]
    assert {edge for edge, _ in found.buckets} == edges


def test_fault_11_a_hit_rate_comes_from_tokens_and_not_from_the_last_batch() -> None:
    names = {name for table in TABLES for name in (line.name for line in table.lines)}
    assert not {name for name in names if name.endswith(("hit_rate", "acceptance_rate"))}
    rank = 'model_name="m",tp_rank="0"'
    sample = read(
        "sglang",
        f"sglang:cache_hit_rate{{{rank}}} 0.0",  # a probe was the last batch
        f'sglang:prefill_effective_tokens_total{{{rank},mode="input"}} 600',
        f'sglang:prefill_effective_tokens_total{{{rank},mode="device_hit"}} 400',
        version="0.5.23",
    )
    hits, queries = sample.total("kv_hit_tokens_total"), sample.total("kv_query_tokens_total")
    assert hits is not None
    assert queries is not None
    assert hits / queries == 0.4


@pytest.mark.parametrize(
    ("engine", "queries", "hits"),
    [
        ("vllm", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        ("vllm", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
        ("vllm", "vllm:prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"),
        ("sglang", "sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
    ],
)
def test_fault_12_more_hits_than_lookups_are_refused(engine: str, queries: str, hits: str) -> None:
    for found, believed in ((100, True), (101, False), (1e9, False)):
        sample = read(engine, f"{queries} 100", f"{hits} {found}")
        assert (sample.total("kv_hit_tokens_total") is not None) is believed
        assert bool(sample.refused) is not believed
        assert sample.total("kv_query_tokens_total") == 100


def test_fault_14_a_hybrid_model_is_read_by_its_full_attention_cache() -> None:
    lines = ["sglang:token_usage 0.98", "sglang:full_token_usage 0.21", "sglang:mamba_usage 0.98"]
    for order in (lines, lines[::-1]):
        assert read("sglang", *order).peak("kv_usage_ratio") == 0.21
    assert read("sglang", lines[0]).peak("kv_usage_ratio") == 0.98  # older: there is no other


def test_fault_17_what_a_scrape_resets_is_not_read() -> None:
    before, after = (
        (FIXTURES / "llamacpp" / "b11549" / name).read_text(encoding="utf-8")
        for name in ("metrics_after.txt", "metrics_after2.txt")
    )
    changed = {a for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b}
    assert {line.split()[0] for line in changed} == {
        "llamacpp:prompt_tokens_seconds", "llamacpp:predicted_tokens_seconds"
    }  # fmt: skip
    parser = parser_for("llamacpp", None)
    assert parser.parse(before).readings == parser.parse(after).readings


@EACH
def test_fault_18_a_gauge_of_several_processes_follows_the_one_that_moves(table: Table) -> None:
    name = table.prefixes[0] + next(x.name for x in table.lines if x.signal == "running")
    parser = parser_for(table.engine, None)

    def running(*values: int) -> float | None:
        text = "".join(f'{name}{{pid="{i}"}} {value}\n' for i, value in enumerate(values))
        sample = parser.parse(text)
        assert sample.unknown == (f"{name}{{pid}}",)  # an unexpected label is said
        return sample.total("running")

    assert running(9, 3, 1) == 9
    for value in (4, 2, 0, 7):
        assert running(9, 3, value) == value  # neither the sum nor the largest


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_fault_19_ranks_with_the_same_requests_do_not_multiply_them(ranks: int) -> None:
    """Tensor, pipeline, expert and context ranks say one engine's numbers, several times."""
    for label in ("tp_rank", "pp_rank", "moe_ep_rank"):
        lines = [f'sglang:num_running_reqs{{model_name="m",{label}="{i}"}} 6' for i in range(ranks)]
        lines += [f'sglang:num_retracted_requests_total{{{label}="{i}"}} 2' for i in range(ranks)]
        sample = read("sglang", *lines)
        assert (sample.total("running"), sample.total("preemptions_total")) == (6, 2)


@pytest.mark.parametrize(
    ("engine", "name", "label"),
    [("vllm", "vllm:num_requests_running", "engine"), ("sglang", "sglang:num_running_reqs",
     "dp_rank")],
)  # fmt: skip
def test_fault_19_no_replica_is_left_out(engine: str, name: str, label: str) -> None:
    sample = read(engine, *(f'{name}{{{label}="{i}"}} {i}' for i in range(8)))
    assert sample.total("running") == sum(range(8))
    assert by_label(sample, "running", "rank") == {str(i): i for i in range(8)}


def test_fault_21_progress_shows_while_no_request_ends() -> None:
    """SGLang's generation_tokens_total moves when a request has ended: a long answer looks dead."""
    parser = parser_for("sglang", "0.5.23")
    seen = []
    for step in (100, 140, 180):
        sample = parser.parse(
            "sglang:num_running_reqs 1\nsglang:generation_tokens_total 7\n"
            f'sglang:realtime_tokens_total{{mode="decode"}} {step}\n'
        )
        seen.append(sample.total("scheduled_tokens_total"))
        assert sample.total("engine_generated_tokens_total") == 7
    assert seen == [100, 140, 180]


@EACH
def test_fault_25_thousands_of_junk_models_hide_nothing(table: Table) -> None:
    prefix = table.prefixes[0]
    running, waiting = (
        prefix + next(x.name for x in table.lines if x.signal == signal)
        for signal in ("running", "waiting")
    )
    junk = [f'{running}{{model_name="junk-{i}"}} 1' for i in range(30_000)]
    sample = read(table.engine, *junk, f'{waiting}{{model_name="real"}} 7')
    assert len(sample.readings) <= 5_001
    assert sample.total("waiting") == 7
    refused = [r for r in sample.refused if "left out" in r.why]
    assert bool(refused) is ("model_name" in table.kept_labels)


@EACH
def test_fault_26_every_prefix_is_read(table: Table) -> None:
    running = next(x.name for x in table.lines if x.signal == "running")
    for prefix in table.prefixes:
        assert read(table.engine, f"{prefix}{running} 4").total("running") == 4
    assert {f"{table.engine}:", f"{table.engine}_"} <= set(table.prefixes)


@EACH
@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_fault_29_what_is_no_number_never_becomes_one(table: Table, value: str) -> None:
    for line in table.lines:
        name = table.prefixes[0] + line.name
        labels = "".join(f'{n}="{values[0]}"' for n, values in line.where if values[0])
        if line.kind is Kind.HISTOGRAM:
            lines = [
                f'{name}_bucket{{le="0.5"}} 1', f'{name}_bucket{{le="+Inf"}} 2',
                f"{name}_sum {value}", f"{name}_count 2",
            ]  # fmt: skip
        else:
            lines = [f"{name}{{{labels}}} {value}"]
        sample = read(table.engine, *lines)
        assert (sample.readings, sample.histograms) == ((), ())
        assert sample.refused, name
        assert line.addends > 1 or line.signal not in sample.absent


@EACH
def test_fault_31_nothing_to_do_no_number_and_a_wrong_number_are_three_things(table: Table) -> None:
    name = table.prefixes[0] + next(x.name for x in table.lines if x.signal == "running")
    idle, missing, wrong = (
        read(table.engine, *lines) for lines in ([f"{name} 0"], [], [f"{name} -3"])
    )
    assert (idle.total("running"), "running" in idle.absent, idle.refused) == (0, False, ())
    assert (missing.total("running"), "running" in missing.absent) == (None, True)
    assert missing.refused == ()
    assert (wrong.total("running"), "running" in wrong.absent) == (None, False)
    assert [r.name for r in wrong.refused] == [name]

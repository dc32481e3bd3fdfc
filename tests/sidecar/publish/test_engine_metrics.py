"""An engine's own numbers into our families."""

from __future__ import annotations

import math

from servoscope.exporters.records import EngineSample, HistogramReading, Reading
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry

IDENTITY = Identity("vllm", "h:1", "m", "v1", "none")
FLEET = ("vllm", "h:1", "m", "v1", "none")


def reading(name: str, value: float, **labels: str) -> Reading:
    return Reading(name, value, tuple(sorted(labels.items())))


def sample(*readings: Reading, histograms: tuple[HistogramReading, ...] = ()) -> EngineSample:
    return EngineSample(engine="vllm", version="0.32.0", readings=readings, histograms=histograms)


def e2e(count: float) -> HistogramReading:
    buckets = ((0.3, count / 2), (1.0, count), (math.inf, count))
    return HistogramReading("reported_e2e_seconds", buckets, count * 0.4, count)


def made() -> tuple[Registry, EngineMetrics]:
    registry = Registry()
    return registry, EngineMetrics(registry, IDENTITY)


def test_ranks_are_summed_and_ratios_take_the_fullest() -> None:
    registry, metrics = made()
    metrics.observe(
        sample(
            reading("running", 2, rank="0"), reading("running", 3, rank="1"),
            reading("kv_usage_ratio", 0.2, rank="0"), reading("kv_usage_ratio", 0.9, rank="1"),
            reading("preemptions_total", 1, rank="0"), reading("preemptions_total", 4, rank="1"),
        )
    )  # fmt: skip
    assert registry.family("running").values() == {FLEET: 5.0}
    assert registry.family("kv_usage_ratio").values() == {FLEET: 0.9}
    assert registry.family("preemptions_total").values() == {FLEET: 5.0}


def test_the_engines_own_model_name_is_kept() -> None:
    registry, metrics = made()
    metrics.observe(sample(reading("running", 1, model_name="lora")))
    assert list(registry.family("running").values()) == [("vllm", "h:1", "lora", "v1", "none")]


def test_a_restart_never_makes_a_counter_fall() -> None:
    registry, metrics = made()
    family = registry.family("engine_generated_tokens_total")
    metrics.observe(sample(reading("engine_generated_tokens_total", 1000)), "one")
    metrics.observe(sample(reading("engine_generated_tokens_total", 1500)), "one")
    progress = metrics.observe(sample(reading("engine_generated_tokens_total", 20)), "two")
    assert progress.reset
    assert family.values() == {FLEET: 1520.0}


def test_a_counter_that_falls_without_a_restart_is_named() -> None:
    _, metrics = made()
    metrics.observe(sample(reading("preemptions_total", 10)), "one")
    progress = metrics.observe(sample(reading("preemptions_total", 9)), "one")
    assert progress.fell == ("preemptions_total",)
    assert not progress.reset


def test_busy_means_work_runs_waits_or_was_done() -> None:
    _, metrics = made()
    tokens = "engine_generated_tokens_total"
    assert not metrics.observe(sample(reading(tokens, 5), reading("running", 0))).busy
    assert metrics.observe(sample(reading(tokens, 6), reading("running", 0))).busy
    assert not metrics.observe(sample(reading(tokens, 6), reading("running", 0))).busy
    assert metrics.observe(sample(reading(tokens, 6), reading("waiting", 1))).busy


def test_request_counts_and_histograms_appear_only_where_nobody_sees_requests() -> None:
    registry, metrics = made()
    name = "engine_requests_total"

    def step(n: float) -> None:
        metrics.observe(sample(reading(name, n, finish_reason="stop"), histograms=(e2e(n),)))

    step(10)
    step(12)
    assert len(registry.family("requests_total")) == 0
    assert len(registry.histogram("reported_e2e_seconds")) == 0
    metrics.publish_requests = True
    step(15)
    (key,) = registry.family("requests_total").values()
    assert key[7:9] == ("scrape", "completed")
    assert registry.family("requests_total").get(key) == 3  # since it is in force: none twice
    assert "servoscope_reported_e2e_seconds_count" in registry.render()
    metrics.stop_requests()
    step(20)
    assert registry.family("requests_total").get(key) == 3
    assert "reported_" not in registry.render()


def test_junk_models_of_an_engine_gone_mad_are_bounded_and_still_counted() -> None:
    registry, metrics = made()
    metrics.publish_requests = True
    metrics.observe(sample(reading("engine_requests_total", 1, finish_reason="stop")))
    for start in range(0, 5_000, 500):
        models = [f"junk{i}" for i in range(start, start + 500)]
        metrics.observe(
            sample(*(reading("engine_requests_total", 1, model_name=m) for m in models))
        )
    found = registry.family("requests_total").values()
    assert len(found) <= 1_001
    assert sum(found.values()) == 5_000
    assert len(registry.family("engine_requests_total")) <= 1_000


def test_finish_reasons_become_outcomes() -> None:
    registry, metrics = made()
    metrics.publish_requests = True
    reasons = {"stop": "completed", "length": "length", "abort": "cancelled", "error": "error",
               "strange": "unknown"}  # fmt: skip
    for n in (0.0, 1.0):
        metrics.observe(
            sample(*(reading("engine_requests_total", n, finish_reason=r) for r in reasons))
        )
    found = {key[8] for key in registry.family("requests_total").values()}
    assert found == set(reasons.values())


def test_own_histograms_survive_a_restart() -> None:
    registry, metrics = made()
    metrics.publish_requests = True
    metrics.observe(sample(histograms=(e2e(10),)), "one")
    metrics.observe(sample(histograms=(e2e(4),)), "two")
    text = registry.render()
    assert 'le="+Inf"} 14.0' in text
    assert 'le="0.3"} 7.0' in text


def test_names_that_the_catalogue_does_not_have_are_left_out() -> None:
    registry, metrics = made()
    metrics.observe(sample(reading("made_up", 1), reading("requests_total", 5)))
    assert registry.render() == ""


def test_gauges_end_when_the_engine_is_gone_and_counters_stay() -> None:
    registry, metrics = made()
    metrics.observe(sample(reading("running", 1), reading("preemptions_total", 2)))
    metrics.gone()
    assert registry.family("running").values() == {}
    assert registry.family("preemptions_total").values() == {FLEET: 2.0}


def test_another_model_version_ends_what_was_counted_under_the_old_one() -> None:
    registry, metrics = made()
    metrics.observe(sample(reading("preemptions_total", 2)), "one")
    metrics.forget_identity()
    metrics.identity = Identity("vllm", "h:1", "m", "v2", "none")
    metrics.observe(sample(reading("preemptions_total", 1)), "two")
    assert registry.family("preemptions_total").values() == {
        ("vllm", "h:1", "m", "v2", "none"): 1.0
    }

"""Records into series: what counts where, and that nothing grows without bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.spec import Objective, default_spec
from servoscope.alerts.verdict import meets_all, verdict
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.sidecar.config import LabelsConfig
from servoscope.sidecar.measure.aggregate import Aggregate
from servoscope.sidecar.publish.families import Registry

Make = Callable[..., RequestRecord]
OBJECTIVES = default_spec().objectives
SLICE = ("vllm", "h:1", "m", "v1", "chat", "none", "true", "plugin")


def identified(record: RequestRecord, request_type: str = "chat") -> RequestRecord:
    record.engine, record.server = "vllm", "h:1"
    record.model_name, record.model_version = "m", "v1"
    record.request_type = request_type
    return record


def counting(
    labels: LabelsConfig | None = None, objectives: Sequence[Objective] = OBJECTIVES
) -> tuple[Registry, Aggregate]:
    registry = Registry()
    return registry, Aggregate(registry, objectives, labels or LabelsConfig())


def test_one_record_counts_once_everywhere(make_record: Make) -> None:
    registry, aggregate = counting()
    aggregate.observe(identified(make_record()))
    assert registry.family("requests_total").get((*SLICE, "completed", "decode")) == 1
    for name in ("time_to_first_token_seconds", "e2e_seconds", "queue_seconds", "prompt_tokens"):
        assert registry.histogram(name).series(SLICE).classic.count == 1
    assert registry.family("throughput_tokens_total").get(SLICE) == 31
    assert registry.family("goodput_tokens_total").get(SLICE) == 31
    assert registry.family("goodput_requests_total").get(SLICE) == 1


def test_a_rejection_is_no_fast_answer(make_record: Make) -> None:
    registry, aggregate = counting()
    record = make_record(
        outcome=Outcome.REJECTED, phase=Phase.QUEUED, e2e_seconds=0.001,
        time_to_first_token_seconds=None, time_per_output_token_seconds=None, output_tokens=None,
    )  # fmt: skip
    aggregate.observe(identified(record))
    assert registry.histogram("e2e_seconds").series(SLICE).classic.count == 0
    assert registry.family("requests_total").get((*SLICE, "rejected", "queued")) == 1
    assert registry.family("goodput_requests_total").get(SLICE) == 0
    totals = registry.family("slo_total").values()
    goods = registry.family("slo_good_total").values()
    assert sum(totals.values()) > 0
    assert sum(goods.values()) == 0


def test_a_client_that_left_did_wait_for_its_first_token(make_record: Make) -> None:
    registry, aggregate = counting()
    aggregate.observe(identified(make_record(outcome=Outcome.CLIENT_DISCONNECT)))
    assert registry.histogram("time_to_first_token_seconds").series(SLICE).classic.count == 1
    assert registry.histogram("e2e_seconds").series(SLICE).classic.count == 0


def test_token_gaps_are_counted_one_by_one(make_record: Make) -> None:
    registry, aggregate = counting()
    aggregate.observe(identified(make_record(inter_token_seconds=(0.01, 0.02, 0.5))))
    gaps = registry.histogram("inter_token_latency_seconds").series(SLICE)
    assert gaps.classic.count == 3
    assert gaps.classic.total == pytest.approx(0.53)


def test_streaming_that_nobody_saw_is_unknown(make_record: Make) -> None:
    registry, aggregate = counting()
    aggregate.observe(identified(make_record(streaming=None)))
    (labels,) = registry.family("requests_total").values()
    assert labels[6] == "unknown"


def test_tenants_are_on_sli_counters_only(make_record: Make) -> None:
    registry, aggregate = counting()
    for tenant in ("a", "b"):
        aggregate.observe(identified(make_record(tenant=tenant)))
    assert len(registry.family("requests_total")) == 1
    tenants = {labels[-1] for labels in registry.family("slo_total").values()}
    assert tenants == {"a", "b"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Outcome)),
            st.none() | st.floats(0, 100),
            st.none() | st.floats(0, 10),
            st.none() | st.floats(0, 400),
            st.none() | st.integers(0, 5000),
            st.sampled_from([True, False, None]),
            st.sampled_from(["chat", "rag", "probe", "x"]),
        ),
        max_size=30,
    )
)
def test_good_never_exceeds_total_and_equals_the_verdicts(rows: list[tuple[object, ...]]) -> None:
    registry, aggregate = counting()
    records = []
    for outcome, ttft, tpot, e2e, tokens, streaming, kind in rows:
        record = RequestRecord(
            request_id="r", source=Source.TAP, outcome=outcome,  # type: ignore[arg-type]
            time_to_first_token_seconds=ttft,  # type: ignore[arg-type]
            time_per_output_token_seconds=tpot,  # type: ignore[arg-type]
            e2e_seconds=e2e, output_tokens=tokens, streaming=streaming,  # type: ignore[arg-type]
        )  # fmt: skip
        records.append(identified(record, str(kind)))
        aggregate.observe(records[-1])
    total = registry.family("slo_total").values()
    good = registry.family("slo_good_total").values()
    over = registry.family("slo_over_total").values()
    for labels, n in good.items():
        assert n <= total[labels]
    for (service, name, factor, *rest), n in over.items():
        assert factor == "1.5"
        assert n + good[service, name, *rest] <= total[service, name, *rest]
    verdicts = [verdict(o, r) for o in OBJECTIVES for r in records]
    assert sum(total.values()) == sum(v.counted for v in verdicts)
    assert sum(good.values()) == sum(v.good for v in verdicts)
    assert sum(over.values()) == sum(v.over for v in verdicts)
    censored = registry.family("slo_censored_total").values()
    assert sum(censored.values()) == sum(v.censored for v in verdicts)
    goodput = registry.family("goodput_requests_total").values()
    assert sum(goodput.values()) == sum(meets_all(OBJECTIVES, r) is True for r in records)


def test_probes_are_in_no_sli(make_record: Make) -> None:
    registry, aggregate = counting()
    aggregate.observe(identified(make_record(), "probe"))
    assert len(registry.family("slo_total")) == 0
    assert sum(registry.family("requests_total").values().values()) == 1


def test_100_000_junk_names_stay_within_the_caps_and_real_ones_stay_visible(
    make_record: Make,
) -> None:
    labels = LabelsConfig(max_models=10, max_tenants=20, max_slices=50, max_slo_series=500)
    registry, aggregate = counting(labels, OBJECTIVES[:1])
    # Without its latencies: labels are what is tested, 100,000 times.
    record = identified(
        make_record(
            queue_seconds=None, prefill_seconds=None, decode_seconds=None, cached_tokens=None,
            time_per_output_token_seconds=None, prompt_tokens=None,
        )
    )  # fmt: skip
    for i in range(100_000):
        record.tenant = f"junk-{i}" if i % 10 else f"real-{i // 10 % 5}"
        odd = i % 100 == 1
        record.model_name = f"model-{i}" if odd else "m"
        record.request_type = f"type-{i}" if odd else "chat"
        aggregate.observe(record)
    sizes = aggregate.label_sizes()
    assert sizes["tenant"] <= 20
    assert sizes["model_name"] <= 10
    # one more place a table: `other` is always let in
    assert sizes["slice"] <= 50 + 6
    assert sizes["slo_series"] <= 500 + 56  # `other` tenant of every slice
    assert len(registry.family("requests_total")) <= 60
    tenants = {lab[-1] for lab in registry.family("slo_total").values()}
    assert {f"real-{i}" for i in range(5)} <= tenants
    assert aggregate.folded()["tenant"] > 50_000
    assert sum(registry.family("requests_total").values().values()) <= 100_000
    rendered = registry.render()
    assert len(rendered) < 8_000_000


def test_an_evicted_model_takes_its_series_along(make_record: Make) -> None:
    registry, aggregate = counting(LabelsConfig(max_models=1))
    first = identified(make_record())
    aggregate.observe(first)
    for _ in range(4):
        record = identified(make_record())
        record.model_name = "m2"
        aggregate.observe(record)
    models = {labels[2] for labels in registry.family("requests_total").values()}
    assert "m" not in models
    assert "m2" in models
    assert 'model_name="m"' not in registry.render()


def test_targets_and_thresholds_are_published() -> None:
    registry, _ = counting()
    targets = registry.family("slo_target_ratio").values()
    assert set(targets) == {(o.service, o.name) for o in OBJECTIVES}
    thresholds = registry.family("slo_threshold_seconds").values()
    for o in OBJECTIVES:
        assert thresholds.get((o.service, o.name)) == o.threshold_seconds

"""A record is completed, cleaned, typed and counted; a bad one stops nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.spec import default_spec
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.sidecar.config import LabelsConfig
from servoscope.sidecar.measure.aggregate import Aggregate
from servoscope.sidecar.measure.classify import Classifier
from servoscope.sidecar.measure.pipeline import Identity, Pipeline
from servoscope.sidecar.publish.families import Registry

Make = Callable[..., RequestRecord]
IDENTITY = Identity("vllm", "127.0.0.1:8000", "m", "v1", "none")


def piped(push: Callable[[RequestRecord], None] | None = None) -> tuple[Registry, Pipeline]:
    registry = Registry()
    aggregate = Aggregate(registry, default_spec().objectives, LabelsConfig())
    pipeline = Pipeline(aggregate, Classifier(), IDENTITY, clock=lambda: 1_800_000_001.0, push=push)
    return registry, pipeline


def test_a_record_gets_its_identity_and_type(make_record: Make) -> None:
    pushed: list[RequestRecord] = []
    _, pipeline = piped(pushed.append)
    pipeline.take(make_record())
    (record,) = pushed
    assert (record.engine, record.server) == ("vllm", "127.0.0.1:8000")
    assert (record.model_name, record.model_version, record.gpu_model) == ("m", "v1", "none")
    assert record.request_type == "chat"
    assert pipeline.taken == 1


def test_what_the_source_knows_better_stays(make_record: Make) -> None:
    pushed: list[RequestRecord] = []
    _, pipeline = piped(pushed.append)
    pipeline.take(make_record(model_name="lora-7", gpu_model="H200"))
    assert (pushed[0].model_name, pushed[0].gpu_model) == ("lora-7", "H200")


def test_impossible_values_are_counted_by_field_and_nothing_else_is_lost(make_record: Make) -> None:
    registry, pipeline = piped()
    pipeline.take(make_record(queue_seconds=-1.0, e2e_seconds=1e9))
    assert pipeline.refused["plugin", "queue_seconds"] == 1
    assert pipeline.refused["plugin", "e2e_seconds"] == 1
    assert sum(registry.family("requests_total").values().values()) == 1
    assert "queue_seconds" not in registry.render()


def test_one_token_has_no_pace(make_record: Make) -> None:
    registry, pipeline = piped()
    pipeline.take(make_record(output_tokens=1, time_per_output_token_seconds=0.0))
    assert "time_per_output_token_seconds_count" not in registry.render()


def test_a_record_that_cannot_be_counted_stops_nothing(make_record: Make) -> None:
    registry, pipeline = piped()
    broken: Any = make_record()
    broken.streaming = []  # no label for this
    pipeline.take(broken)
    pipeline.take(make_record())
    assert pipeline.failed["plugin"] == 1
    assert pipeline.taken == 1
    assert sum(registry.family("requests_total").values().values()) == 1


ANYTHING = st.none() | st.floats() | st.integers(-(10**12), 10**12)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, st.lists(st.floats(), max_size=5))
def test_no_value_whatever_raises_into_the_source(
    ttft: Any, e2e: Any, prompt: Any, output: Any, gaps: list[float]
) -> None:
    registry, pipeline = piped()
    record = RequestRecord(
        request_id="r", source=Source.TAP, outcome=Outcome.COMPLETED,
        time_to_first_token_seconds=ttft, e2e_seconds=e2e, received_unix_seconds=ttft,
        prompt_tokens=prompt, output_tokens=output, inter_token_seconds=tuple(gaps),
    )  # fmt: skip
    pipeline.take(record)
    assert pipeline.taken == 1
    assert pipeline.failed == {}
    assert sum(registry.family("requests_total").values().values()) == 1


def test_a_probe_by_header_counts_in_the_slis_and_is_told(make_record: Make) -> None:
    registry, pipeline = piped()
    pipeline.take(make_record(request_type_hint="probe"))
    pipeline.take(make_record(request_type_hint="chat"))
    assert pipeline.probe_claims == 1
    assert "probe" not in registry.render()
    totals = registry.family("slo_total").values()
    assert sum(n for labels, n in totals.items() if "errors" in labels) == 2

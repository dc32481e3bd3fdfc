"""What the sidecar says of itself."""

from __future__ import annotations

from servoscope.exporters.records import Phase, Source, SourceState, SourceStatus
from servoscope.sidecar.measure.classify import Classifier
from servoscope.sidecar.measure.labels import LabelTable
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.publish.self_metrics import SelfMetrics
from servoscope.sidecar.sources.source import OpenRequest

IDENTITY = Identity("vllm", "h:1", "m", "v", "none")


def as_it_is(_label: str, value: str) -> str:
    return value


def made() -> tuple[Registry, SelfMetrics]:
    registry = Registry()
    return registry, SelfMetrics(registry, "vllm", "h:1")


def test_each_state_is_told_from_the_others_and_off_has_no_series() -> None:
    registry, own = made()
    for state in SourceState:
        own.sources([SourceStatus(source=Source.SCRAPE, state=state, read_seconds=0.1)])
        up = registry.family("source_up").values()
        states = registry.family("source_state").values()
        if state is SourceState.OFF:
            assert up == states == {}
            continue
        healthy = state in (SourceState.OK, SourceState.IDLE)
        assert up == {("vllm", "h:1", "scrape"): float(healthy)}
        assert {k[3] for k, v in states.items() if v == 1.0} == {state.value}
        assert len(states) == 5


def test_in_flight_by_type_and_phase_and_zero_when_done() -> None:
    registry, own = made()
    requests = [
        OpenRequest("a", Phase.DECODE, request_type_hint="rag"),
        OpenRequest("b", Phase.DECODE, request_type_hint="rag"),
        OpenRequest("c", Phase.QUEUED),
    ]
    family = registry.family("requests_in_flight")
    own.in_flight(requests, IDENTITY, Classifier(), as_it_is)
    head = ("vllm", "h:1", "m", "v", "none")
    assert family.values() == {(*head, "rag", "decode"): 2.0, (*head, "unknown", "queued"): 1.0}
    own.in_flight([], IDENTITY, Classifier(), as_it_is)
    assert set(family.values().values()) == {0.0}


def test_open_requests_at_100_times_the_cap_are_bounded() -> None:
    registry, own = made()
    requests = [OpenRequest(str(i), Phase.DECODE, request_type_hint=f"t{i}") for i in range(50_000)]
    own.in_flight(requests, IDENTITY, Classifier(), as_it_is)
    values = registry.family("requests_in_flight").values()
    assert len(values) <= 501
    assert sum(values.values()) == 50_000


def test_open_requests_are_under_the_caps_of_finished_ones() -> None:
    """Junk that was in flight once must not keep the places of what is real."""
    registry, own = made()
    table = LabelTable({"model_name": 2, "request_type": 3}, lambda _label, _value: None)
    family = registry.family("requests_in_flight")
    junk = [
        OpenRequest(str(i), Phase.DECODE, request_type_hint=f"t{i}", model_name=f"m{i}")
        for i in range(1_000)
    ]
    own.in_flight(junk, IDENTITY, Classifier(), table.shown)
    assert sum(family.values().values()) == 1_000
    for label in ("model_name", "request_type"):
        table.admit(label, "real")
        for i in range(1_000):  # the junk ends, and fills the table as far as there is room
            table.admit(label, f"junk{i}")
    real = [OpenRequest("r", Phase.DECODE, request_type_hint="real", model_name="real")]
    own.in_flight([*junk, *real], IDENTITY, Classifier(), table.shown)
    values = family.values()
    assert values["vllm", "h:1", "real", "v", "none", "real", "decode"] == 1.0
    assert values["vllm", "h:1", "other", "v", "none", "other", "decode"] == 1_000.0
    assert len(values) == 2
    own.in_flight([], IDENTITY, Classifier(), table.shown)
    assert family.values().keys() == values.keys()  # at 0, and still there


def test_rendering_twice_changes_nothing() -> None:
    registry, own = made()
    for _ in range(2):
        own.counters("source_errors_total", {("scrape", "timeout"): 3})
        own.gauges("push_queue_records", {(): 4.0})
    assert registry.family("source_errors_total").get(("vllm", "h:1", "scrape", "timeout")) == 3
    assert registry.family("push_queue_records").values() == {("vllm", "h:1"): 4.0}

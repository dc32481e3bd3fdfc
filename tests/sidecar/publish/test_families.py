"""/metrics read back by prometheus_client: the oracle of both formats."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from servoscope.exporters.catalog import CATALOG, LATENCY_BUCKETS_SECONDS, Kind
from servoscope.sidecar.publish.families import Registry

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(families: Any) -> Samples:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def both(registry: Registry) -> tuple[Samples, Samples]:
    text = samples(parse_text(registry.render()))
    rendered = registry.render(openmetrics=True) + "# EOF\n"
    return text, samples(parse_openmetrics(rendered))  # type: ignore[no-untyped-call]


def filled() -> Registry:
    """One series of every metric of the catalogue."""
    registry = Registry()
    for m in CATALOG:
        labels = tuple(f"v-{name}" for name in m.labels)
        if m.kind is Kind.HISTOGRAM:
            registry.histogram(m.name).series(labels).observe(2.0)
        else:
            registry.family(m.name).series(labels).value = 3.0
    return registry


def test_every_metric_of_the_catalogue_reads_back_in_both_formats() -> None:
    text, openmetrics = both(filled())
    assert text == openmetrics
    for m in CATALOG:
        labels = {name: f"v-{name}" for name in m.labels}
        if m.kind is Kind.HISTOGRAM:
            key = (f"{m.full_name}_count", tuple(sorted(labels.items())))
            assert text[key] == 1.0
        else:
            assert text[m.full_name, tuple(sorted(labels.items()))] == 3.0


def test_kinds_and_help_read_back() -> None:
    kinds = {f.name: (f.type, f.documentation) for f in parse_text(filled().render())}
    for m in CATALOG:
        name = m.full_name.removesuffix("_total") if m.kind is Kind.COUNTER else m.full_name
        assert kinds[name] == (m.kind.value, m.help)


def test_histograms_equal_prometheus_clients_own() -> None:
    registry, theirs = Registry(), CollectorRegistry()
    slice_ = ("vllm", "h:1", "m", "v", "chat", "none", "true", "plugin")
    ours = registry.histogram("e2e_seconds").series(slice_)
    names = registry.histogram("e2e_seconds").metric.labels
    oracle = Histogram(
        "servoscope_e2e_seconds", "x", names, buckets=LATENCY_BUCKETS_SECONDS, registry=theirs
    ).labels(*slice_)
    for value in (0.0, 0.001, 0.00100001, 0.3, 0.3000001, 299.0, 300.0, 301.0, 1e6):
        ours.observe(value)
        oracle.observe(value)
    expected = samples(parse_text(generate_latest(theirs).decode()))
    expected = {k: v for k, v in expected.items() if not k[0].endswith("_created")}
    assert samples(parse_text(registry.render())) == expected


@given(
    st.text(max_size=40),
    st.one_of(st.floats(allow_nan=False), st.integers(-(2**53), 2**53)),
)
def test_any_label_text_and_value_survives(label: str, value: float) -> None:
    registry = Registry()
    name = "slo_threshold_seconds"
    registry.family(name).set((label, '"\\\n'), value)
    key = ("servoscope_" + name, (("objective", '"\\\n'), ("service", label)))
    if "\r" not in label and not any(c in label for c in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"):
        text, openmetrics = both(registry)
        assert text == openmetrics == {key: value}
    else:  # the oracle's reader splits lines at these; the format has only \n
        assert registry.render().count("\n") == 3


@given(st.text(st.characters(categories=["Cs", "L", "N"]), min_size=1, max_size=8))
def test_lone_surrogates_never_cost_the_whole_exposition(label: str) -> None:
    """JSON of an engine ("\\ud800") and argv that is no UTF-8 can hold them."""
    registry = Registry()
    registry.family("slo_threshold_seconds").set((label, "o"), 1.0)
    registry.histogram("e2e_seconds").series(
        ("vllm", "h:1", label, "v", "chat", "none", "true", "plugin")
    ).observe(1.0)
    text = registry.render().encode().decode()
    if not any(c.isspace() for c in label):
        assert len(list(parse_text(text))) == 2


def test_percent_signs_in_labels_do_not_break_the_template() -> None:
    registry = Registry()
    labels = ("vllm", "h:1", "100%s%d%%", "v", "chat", "none", "true", "plugin")
    registry.histogram("e2e_seconds").series(labels).observe(1.0)
    found = samples(parse_text(registry.render()))
    assert any(("model_name", "100%s%d%%") in key[1] for key in found)


def test_an_engines_own_edges_can_be_shown() -> None:
    registry = Registry()
    labels = ("vllm", "h:1", "m", "v", "none", "scrape")
    family = registry.histogram("reported_e2e_seconds")
    family.set_foreign(labels, [(0.3, 1.0), (2.5, 4.0), (math.inf, 5.0)], 7.5, 5.0)
    text, openmetrics = both(registry)
    assert text == openmetrics
    assert {dict(k[1])["le"]: v for k, v in text.items() if k[0].endswith("_bucket")} == {
        "0.3": 1.0,
        "2.5": 4.0,
        "+Inf": 5.0,
    }
    family.clear()
    assert registry.render() == ""


def test_counters_never_fall_and_nan_is_no_reading() -> None:
    registry = Registry()
    counter = registry.family("engine_restarts_total")
    counter.add(("e", "s"), 2)
    counter.add(("e", "s"), -1)
    counter.add(("e", "s"), math.nan)
    counter.raise_to(("e", "s"), 1)
    assert counter.get(("e", "s")) == 2
    gauge = registry.family("lease_held")
    gauge.set(("e", "s"), 1.0)
    gauge.set(("e", "s"), math.nan)
    assert gauge.get(("e", "s")) == 1.0


def test_replace_ends_series_that_are_gone() -> None:
    registry = Registry()
    gauge = registry.family("lease_held")
    gauge.set(("e", "a"), 1.0)
    gauge.replace({("e", "b"): 2.0})
    assert gauge.values() == {("e", "b"): 2.0}


def test_only_the_catalogue_can_be_published() -> None:
    registry = Registry()
    with pytest.raises(KeyError):
        registry.family("made_up_total")
    with pytest.raises(KeyError):
        registry.family("e2e_seconds")
    with pytest.raises(KeyError):
        registry.histogram("requests_total")
    with pytest.raises(ValueError, match="zip"):
        registry.family("lease_held").set(("only one",), 1.0)


def test_a_histogram_without_observations_has_no_lines() -> None:
    registry = Registry()
    registry.histogram("e2e_seconds").series(tuple("abcdefgh"))
    assert registry.render() == ""

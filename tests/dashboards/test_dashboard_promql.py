"""PromQL made from the catalogue: what does not fit fails when the query is made."""

from __future__ import annotations

from collections.abc import Callable

import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.dashboards.promql import (
    VARIABLES,
    QueryError,
    Recorded,
    aggregate,
    increase,
    quantile,
    rate,
    ratio,
    selector,
    zero_where_absent,
)
from servoscope.dashboards.recorded import recorded_from
from servoscope.exporters.catalog import CATALOG, Kind, Metric

PUBLISHED = [line for line in CATALOG if line.since is not None]
PLANNED = [line for line in CATALOG if line.since is None]


def of_kind(kind: Kind) -> list[Metric]:
    return [line for line in PUBLISHED if line.kind is kind]


def parsable(expr: str) -> str:
    """The expression with the windows that Grafana fills in: the parser knows no variables."""
    return expr.replace("$__rate_interval", "1m").replace("$__range", "1h")


def test_a_selector_filters_by_the_variables_its_metric_has_labels_for() -> None:
    assert selector("requests_total") == (
        'servoscope_requests_total{model_name=~"$model_name", model_version=~"$model_version", '
        'gpu_model=~"$gpu_model", request_type=~"$request_type", server=~"$server"}'
    )
    assert (
        selector("engine_restarts_total") == 'servoscope_engine_restarts_total{server=~"$server"}'
    )
    assert selector("build_info") == "servoscope_build_info"


def test_matchers_carry_their_operator() -> None:
    text = selector("knob_value", knob='="chunk_tokens"', rank='!="1"')
    assert text == ('servoscope_knob_value{server=~"$server", knob="chunk_tokens", rank!="1"}')


def test_a_quantile_sums_rates_by_le_first() -> None:
    text = quantile(0.99, "queue_seconds", ("request_type",))
    assert text.startswith(
        "histogram_quantile(0.99, sum by (le, request_type) (rate(servoscope_queue_seconds_bucket{"
    )
    assert text.endswith("[$__rate_interval])))")


def test_a_ratio_has_no_value_without_traffic_and_zero_without_a_part() -> None:
    whole = rate("slo_total", ("service",))
    part = zero_where_absent(rate("slo_good_total", ("service",)), whole)
    assert (
        ratio(part, whole)
        == f"({rate('slo_good_total', ('service',))} or 0 * {whole}) / ({whole} > 0)"
    )


@given(
    line=st.sampled_from(PUBLISHED),
    data=st.data(),
)
def test_every_query_that_can_be_made_parses_and_any_other_is_refused(
    line: Metric, data: st.DataObject
) -> None:
    by = tuple(data.draw(st.lists(st.sampled_from(line.labels or ("",)), unique=True)))
    by = tuple(label for label in by if label)
    makers: dict[Kind, tuple[Callable[[str, tuple[str, ...]], str], ...]] = {
        Kind.COUNTER: (rate, increase),
        Kind.GAUGE: (lambda n, b: aggregate("max", n, b),),
        Kind.HISTOGRAM: (lambda n, b: quantile(0.5, n, b),),
    }
    for kind, functions in makers.items():
        for make in functions:
            if kind is line.kind:
                promql_parser.parse(parsable(make(line.name, by)))
            else:
                with pytest.raises(QueryError, match=line.name):
                    make(line.name, by)


@given(name=st.text(max_size=40))
def test_a_name_that_is_not_in_the_catalogue_is_refused(name: str) -> None:
    if name in {line.name for line in CATALOG}:
        return
    with pytest.raises(QueryError, match="not in the catalogue"):
        selector(name)


def test_a_planned_metric_is_refused() -> None:
    assert PLANNED
    for line in PLANNED:
        with pytest.raises(QueryError, match="planned"):
            selector(line.name)


@pytest.mark.parametrize("q", [0, 1, -0.5, 99, float("nan")])
def test_a_quantile_outside_0_to_1_is_refused(q: float) -> None:
    with pytest.raises(QueryError, match="between 0 and 1"):
        quantile(q, "queue_seconds")


def test_an_unknown_label_is_refused_by_name() -> None:
    with pytest.raises(QueryError, match="no label 'outcom'"):
        rate("requests_total", ("outcom",))
    with pytest.raises(QueryError, match="no label 'request_type'"):
        selector("running", request_type='="chat"')


def test_every_variable_is_a_label_of_something_published() -> None:
    labels = {label for line in PUBLISHED for label in line.labels}
    assert set(VARIABLES) <= labels
    assert of_kind(Kind.HISTOGRAM)


RULES = """
groups:
  - name: a
    rules:
      - {record: "x:y:ratio", expr: "1", labels: {service: s, objective: o}}
      - {record: "x:y:ratio", expr: "1", labels: {service: s, only_here: x}}
      - {alert: NotRecorded, expr: "1"}
  - name: b
    rules:
      - {record: "x:z:ratio", expr: "1"}
"""


def test_recorded_series_are_read_from_rules_with_the_labels_all_of_them_set() -> None:
    recorded = recorded_from(RULES)
    assert recorded == Recorded({"x:y:ratio": {"service"}, "x:z:ratio": set()})
    assert recorded.select("x:y:ratio", service="s") == 'x:y:ratio{service="s"}'
    with pytest.raises(QueryError, match="no recording rule writes 'x:other:ratio'"):
        recorded.select("x:other:ratio")
    with pytest.raises(QueryError, match="no label 'only_here'"):
        recorded.select("x:y:ratio", only_here="x")


@pytest.mark.parametrize("text", ["", "groups: 1", "groups: [1]", "{", "[]", "groups:\n- {}"])
def test_what_is_no_rule_file_is_refused(text: str) -> None:
    with pytest.raises(QueryError, match="not a rule file"):
        recorded_from(text)

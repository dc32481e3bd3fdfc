"""Queries read back from dashboard JSON, and expanded as Grafana would."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.dashboards.inspection import (
    DashboardError,
    PanelQuery,
    VariableQuery,
    expand,
    metric_names,
    panel_queries,
    variable_queries,
)


def panel(number: int, *targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": number, "title": f"p{number}", "type": "stat", "targets": list(targets), **more}


def test_queries_of_all_panels_in_order_those_of_collapsed_rows_too() -> None:
    board = {
        "panels": [
            panel(1, {"refId": "A", "expr": "up"}, {"refId": "B", "expr": "down", "instant": True}),
            {"type": "row", "title": "r", "panels": [panel(2, {"refId": "A", "expr": "x"})]},
            {"type": "text", "id": 3, "title": "no queries"},
        ]
    }
    assert panel_queries(board) == [
        PanelQuery(panel_id=1, panel_title="p1", ref_id="A", expr="up", instant=False),
        PanelQuery(panel_id=1, panel_title="p1", ref_id="B", expr="down", instant=True),
        PanelQuery(panel_id=2, panel_title="p2", ref_id="A", expr="x", instant=False),
    ]


@pytest.mark.parametrize(
    ("panels", "named"),
    [
        ([panel(7, {"refId": "A"})], r"panel 7 'p7' target 0: no expr"),
        ([panel(7, {"refId": "A", "expr": " "})], "no expr"),
        ([panel(7, {"refId": "A", "expr": 3})], "no expr"),
        (["x"], r"panels\[0\]: expected an object, found str"),
        ({"a": 1}, "panels: expected a list"),
        ([{"type": "row", "panels": [1]}], r"panels\[0\].panels\[0\]: expected an object"),
        ([{}] * 1001, "at most 1000"),
    ],
)
def test_a_dashboard_that_cannot_be_read_is_refused_by_place(panels: Any, named: str) -> None:
    with pytest.raises(DashboardError, match=named):
        panel_queries({"panels": panels})


def test_query_variables_give_label_and_selector() -> None:
    listed = [
        {"type": "datasource", "name": "datasource", "query": "prometheus"},
        {"type": "query", "name": "a", "query": "label_values(up, job)"},
        {"type": "query", "name": "b", "query": 'label_values(up{job=~"$a", x="1, 2"}, instance)'},
        {"type": "query", "name": "c", "query": "label_values(job)"},
    ]
    assert variable_queries({"templating": {"list": listed}}) == [
        VariableQuery(name="a", label="job", selector="up"),
        VariableQuery(name="b", label="instance", selector='up{job=~"$a", x="1, 2"}'),
        VariableQuery(name="c", label="job", selector=""),
    ]
    assert variable_queries({}) == []


@pytest.mark.parametrize("query", ["metrics(x)", "", None, {"query": "x"}, "label_values(up, a b)"])
def test_a_variable_that_is_no_label_values_is_refused(query: Any) -> None:
    listed = [{"type": "query", "name": "v", "query": query}]
    with pytest.raises(DashboardError, match="variable 'v'"):
        variable_queries({"templating": {"list": listed}})


def test_expansion_fills_windows_and_variables_in_each_spelling() -> None:
    query = 'a{x=~"$x", y=~"${y}", z=~"${x:regex}"}[$__rate_interval] b[$__range] c[${__interval}]'
    assert expand(query, {"x": ".*", "y": ["one"]}, "1m", "15m") == (
        'a{x=~".*", y=~"one", z=~".*"}[1m] b[15m] c[1m]'
    )


def test_expansion_refuses_what_has_no_value() -> None:
    with pytest.raises(DashboardError, match=r"\$missing has no value"):
        expand('a{x=~"$missing"}', {}, "1m")
    with pytest.raises(DashboardError, match=r"\$x has an empty list"):
        expand('a{x=~"$x"}', {"x": []}, "1m")


def test_an_end_of_text_anchor_is_no_variable() -> None:
    assert expand('a{x=~"b$"}', {}, "1m") == 'a{x=~"b$"}'


#: Characters that Prometheus cannot keep apart from an escape or a line end are left out.
VALUES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)


@given(st.lists(VALUES, min_size=1, max_size=5, unique=True))
def test_expanded_values_match_themselves_and_stay_one_selector(values: list[str]) -> None:
    expanded = expand('a{x=~"$x"}', {"x": values}, "1m")
    parsed = promql_parser.parse(expanded)
    assert isinstance(parsed, promql_parser.VectorSelector)
    (matcher,) = parsed.matchers.matchers
    for value in values:
        assert re.fullmatch(matcher.value, value)
    assert not re.fullmatch(matcher.value, "".join(values) + "x")


def test_metric_names_are_ours_and_recorded_ones_but_nothing_in_quotes() -> None:
    query = (
        'sum by (le) (rate(servoscope_x_bucket{a="servoscope_quoted", b="c:d"}[5m])) '
        "/ on (service) slo:sli_error:ratio_rate5m or vector(1)"
    )
    assert metric_names(query) == {"servoscope_x_bucket", "slo:sli_error:ratio_rate5m"}


@given(st.text(max_size=200))
def test_any_text_is_read_without_a_crash(text: str) -> None:
    assert all(isinstance(name, str) for name in metric_names(text))
    with contextlib.suppress(DashboardError):
        assert isinstance(expand(text, {}, "1m"), str)

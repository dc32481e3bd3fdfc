"""The committed overview: complete, current, and every query answerable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from servoscope.dashboards import engine_queries, generate, queries
from servoscope.dashboards.generate import check_names, main, render, rendered_dashboards
from servoscope.dashboards.inspection import expand, panel_queries, variable_queries
from servoscope.dashboards.overview import UID, overview
from servoscope.dashboards.panels import Text, slices
from servoscope.dashboards.promql import NOT_SELECTED, VARIABLES, Query, QueryError, Recorded
from servoscope.dashboards.recorded import recorded_series
from servoscope.exporters.catalog import CATALOG, Kind
from servoscope.exporters.records import Outcome, SourceState

ROOT = Path(__file__).parents[2]
ANY = dict.fromkeys(VARIABLES, ".*")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(rendered_dashboards()["overview.json"])
    return loaded


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def by_title(board: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [panel for panel in panels(board) if panel["title"] == title]
    return found


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """Every vector selector below a node of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        below = getattr(node, name, None)
        for child in below if isinstance(below, list) else [below]:
            if child is not None and not callable(child):
                yield from selectors(child)


def test_the_committed_file_is_what_the_source_gives() -> None:
    committed = (ROOT / "dashboards" / "generated" / "overview.json").read_text(encoding="utf-8")
    assert committed == rendered_dashboards()["overview.json"]
    assert main(["--check"]) == 0


def test_the_same_text_every_time() -> None:
    recorded = recorded_series()
    assert render(overview(recorded)) == render(overview(recorded))


def test_uid_and_variables_are_what_links_rely_on(board: dict[str, Any]) -> None:
    assert board["uid"] == UID == "servoscope-overview"
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == [
        "datasource", "model_name", "model_version", "gpu_model", "request_type", "server",
    ]  # fmt: skip
    for variable in board["templating"]["list"][1:]:
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["allValue"] == ".*"
        assert variable["current"]["value"] == ["$__all"]


def test_a_variable_offers_what_fits_the_ones_before_it(board: dict[str, Any]) -> None:
    found = {v.name: v for v in variable_queries(board)}
    assert found["model_name"].selector == "servoscope_engine_up"
    assert found["gpu_model"].selector == (
        'servoscope_engine_up{model_name=~"$model_name", model_version=~"$model_version"}'
    )
    assert all(variable.label == variable.name for variable in found.values())


def test_every_panel_says_what_it_shows(board: dict[str, Any]) -> None:
    for panel in panels(board):
        assert panel["title"].strip()
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(t["datasource"] == panel["datasource"] for t in panel["targets"])
    titles = [(panel["title"], panel["type"]) for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    ids = [panel["id"] for panel in board["panels"]]
    assert ids == list(range(1, len(ids) + 1))


def test_panels_fill_the_grid_without_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    height = max(y for _, y in taken) + 1
    assert len(taken) == 24 * height


@pytest.mark.parametrize(
    "title",
    [
        "Requests", "Error ratio", "Goodput ratio", "Engines up", "Least budget left",
        "Time to first token", "Time per output token", "Queue, p99", "End to end, p99", "Slices",
        "Outcomes", "Error budget left", "Budget burn", "KV cache in use", "Running and waiting",
        "Scheduler CPU", "Chunk: tokens a step", "Engine restarts", "Source states",
    ],
)  # fmt: skip
def test_what_the_overview_has_to_show_is_there(board: dict[str, Any], title: str) -> None:
    assert by_title(board, title)["targets"]


def test_every_query_parses_and_names_only_what_is_published(board: dict[str, Any]) -> None:
    lines = {line.full_name: line for line in CATALOG if line.since is not None}
    recorded = recorded_series()
    asked = panel_queries(board)
    assert len(asked) >= 40
    for query in asked:
        parsed = promql_parser.parse(expand(query.expr, ANY, "1m", "1h"))
        found = list(selectors(parsed))
        assert found, query.expr
        for selector in found:
            name = selector.name or ""
            matched = {m.name for m in selector.matchers.matchers}
            if name in recorded.labels:
                assert matched <= set(recorded.labels[name])
                continue
            line = lines.get(name) or lines[name.removesuffix("_bucket")]
            assert (line.kind is Kind.HISTOGRAM) == name.endswith("_bucket")
            assert matched <= set(line.labels), query.expr
            selected = {
                v for v in VARIABLES if v in line.labels and (line.name, v) not in NOT_SELECTED
            }
            assert selected <= matched, query.expr


def test_quantiles_are_of_rates_summed_by_le(board: dict[str, Any]) -> None:
    quantiles = [q.expr for q in panel_queries(board) if "histogram_quantile" in q.expr]
    assert len(quantiles) >= 12
    for expr in quantiles:
        call = promql_parser.parse(expand(expr, ANY, "1m", "1h"))
        assert isinstance(call, promql_parser.Call)
        summed = call.args[1]
        assert isinstance(summed, promql_parser.AggregateExpr)
        assert str(summed.op) == "sum"
        assert summed.modifier is not None
        assert "le" in summed.modifier.labels
        assert isinstance(summed.expr, promql_parser.Call)
        assert summed.expr.func.name == "rate"


def test_counters_are_never_read_raw(board: dict[str, Any]) -> None:
    for query in panel_queries(board):
        text = query.expr
        for line in CATALOG:
            if line.kind is Kind.COUNTER and line.full_name + "{" in text:
                before = text.split(line.full_name + "{")[:-1]
                assert all(part.endswith(("rate(", "increase(")) for part in before), text


def test_an_outcome_counts_for_the_error_ratio_as_the_contract_says() -> None:
    (query,) = queries.error_ratio()
    counted = 'outcome!~"client_error|unknown|client_disconnect|cancelled"'
    assert 'outcome=~"error|timeout|stuck|rejected"' in query.expr
    assert counted in query.expr
    assert query.expr.count('request_type!="probe"') == 3
    left_out = {"client_error", "unknown", "client_disconnect", "cancelled"}
    bad = {"error", "timeout", "stuck", "rejected"}
    assert {str(o) for o in Outcome} - left_out - bad == {"completed", "length"}


def test_every_source_state_in_use_has_a_number_a_word_and_a_colour(board: dict[str, Any]) -> None:
    panel = by_title(board, "Source states")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert set(engine_queries.SOURCE_STATE_CODES) == set(SourceState) - {SourceState.OFF}
    assert set(mapping["options"]) == {str(c) for c in engine_queries.SOURCE_STATE_CODES.values()}
    for state, code in engine_queries.SOURCE_STATE_CODES.items():
        assert mapping["options"][str(code)]["text"] == state.replace("_", " ")
        assert mapping["options"][str(code)]["color"]


def test_the_slice_table_is_keyed_by_type_version_and_gpu(board: dict[str, Any]) -> None:
    table = by_title(board, "Slices")
    assert all(t["instant"] and t["format"] == "table" for t in table["targets"])
    merge, organize = table["transformations"]
    assert merge["id"] == "merge"
    renamed = organize["options"]["renameByName"]
    order = organize["options"]["indexByName"]
    assert [renamed[name] for name in sorted(order, key=order.__getitem__)][:4] == [
        "Request type", "Model version", "GPU model", "Requests",
    ]  # fmt: skip
    assert {f"Value #{t['refId']}" for t in table["targets"]} <= set(renamed)


def test_a_panel_without_a_meaning_cannot_be_made() -> None:
    for words in (("", "d", "s"), ("t", " ", "s"), ("t", "d", "")):
        with pytest.raises(ValueError, match="is empty"):
            Text(*words)
    with pytest.raises(ValueError, match="no column 'B'"):
        slices(
            Text("t", "d", "s"),
            {"A": Query(expr="up", legend="A", instant=True)},
            keys={},
            units={"B": "s"},
        )


def test_a_rule_that_is_gone_stops_the_build() -> None:
    with pytest.raises(QueryError, match="no recording rule writes 'slo:"):
        overview(Recorded({}))


@pytest.mark.parametrize(
    ("expr", "named"),
    [
        ("sum(servoscope_typo_total)", "servoscope_typo_total"),
        ("servoscope_queue_seconds", "servoscope_queue_seconds"),  # a histogram has no such series
        ("servoscope_control_mode", "servoscope_control_mode"),  # planned
        ("slo:typo:ratio", "slo:typo:ratio"),
        ("up", "names no series of ours"),
    ],
)
def test_a_query_on_what_nobody_publishes_stops_the_build(expr: str, named: str) -> None:
    board = {"panels": [{"id": 1, "title": "P", "targets": [{"expr": expr}]}]}
    with pytest.raises(QueryError, match=named):
        check_names("x.json", board, Recorded({"slo:known:ratio": set()}))


def test_check_names_the_files_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "new")]) == 0
    written = tmp_path / "new" / "overview.json"
    assert main(["--output", str(tmp_path / "new"), "--check"]) == 0
    written.write_text("{}", encoding="utf-8")
    (tmp_path / "new" / "stray.json").write_text("{}", encoding="utf-8")
    assert main(["--output", str(tmp_path / "new"), "--check"]) == 1
    said = capsys.readouterr().err
    assert "overview.json" in said
    assert "stray.json" in said
    assert written.read_text(encoding="utf-8") == "{}"


def test_the_shipped_directory_is_found() -> None:
    assert generate.generated_directory() == ROOT / "dashboards" / "generated"

"""Running a dashboard's queries: what counts as data, and how failures are told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from servoscope.dashboards.live import (
    LiveError,
    live_values,
    main,
    prometheus_reader,
    silent_queries,
)

BOARD: dict[str, Any] = {
    "templating": {
        "list": [
            {"type": "query", "name": "model", "query": "label_values(servoscope_up, model)"},
            {
                "type": "query",
                "name": "server",
                "query": 'label_values(servoscope_up{model=~"$model"}, server)',
            },
        ]
    },
    "panels": [
        {
            "id": 1,
            "title": "Range",
            "targets": [{"refId": "A", "expr": 'rate(x{s=~"$server"}[$__rate_interval])'}],
        },
        {
            "id": 2,
            "title": "Instant",
            "targets": [{"refId": "A", "expr": "y[$__range]", "instant": True}],
        },
    ],
}


class FakePrometheus:
    """Answers label values, and one series of ``values`` a query."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self.labels = {"model": ["m.1"], "server": ["a", "b"]}
        self.values = values
        self.asked: list[tuple[str, Mapping[str, str | list[str]]]] = []

    def __call__(self, path: str, parameters: Mapping[str, str | list[str]]) -> Any:
        self.asked.append((path, parameters))
        if path.startswith("/api/v1/label/"):
            return self.labels[path.split("/")[4]]
        found = self.values[str(parameters["query"])[0]]
        if path == "/api/v1/query":
            return {"result": [{"value": [0, v]} for v in found]}
        return {"result": [{"values": [[0, v] for v in found]}] if found else []}


def test_variables_are_read_in_order_and_filled_into_later_ones_and_queries() -> None:
    prometheus = FakePrometheus({"r": ["1"], "y": ["2"]})
    assert silent_queries(prometheus, BOARD, end=1000.0, window_seconds=600.0) == []
    labels = [p["match[]"] for path, p in prometheus.asked if "/label/" in path]
    assert labels == [["servoscope_up"], ['servoscope_up{model=~"m\\\\.1"}']]
    ranged, instant = [p for path, p in prometheus.asked if "query" in path]
    assert ranged["query"] == 'rate(x{s=~"(a|b)"}[1m])'
    assert (ranged["start"], ranged["end"], ranged["step"]) == ("400.000", "1000.000", "5.000")
    assert instant == {"query": "y[600s]", "time": "1000.000"}


@pytest.mark.parametrize(
    ("values", "why"),
    [([], "no series"), (["NaN", "NaN"], "no finite value"), (["+Inf"], "no finite value")],
)
def test_a_query_without_a_finite_value_is_silent(values: list[str], why: str) -> None:
    (silent,) = silent_queries(FakePrometheus({"r": values, "y": ["0"]}), BOARD, end=1000.0)
    assert silent.why == why
    assert str(silent) == f'Range [A]: {why}: rate(x{{s=~"(a|b)"}}[1m])'


def test_one_finite_value_among_others_is_data() -> None:
    assert silent_queries(FakePrometheus({"r": ["NaN", "0"], "y": ["1"]}), BOARD, end=1.0) == []


def test_a_panel_can_be_left_out() -> None:
    prometheus = FakePrometheus({"r": [], "y": ["1"]})
    assert silent_queries(prometheus, BOARD, end=1.0, ignore=["Range"]) == []


def test_a_refused_query_is_silent_and_the_others_are_still_asked() -> None:
    def read(path: str, parameters: Mapping[str, str | list[str]]) -> Any:
        if path == "/api/v1/query_range":
            raise LiveError("HTTP 422: too many samples")
        return FakePrometheus({"y": ["1"]})(path, parameters)

    (silent,) = silent_queries(read, BOARD, end=1.0)
    assert silent.why == "HTTP 422: too many samples"


def test_a_variable_without_values_is_said() -> None:
    prometheus = FakePrometheus({})
    prometheus.labels["server"] = []
    with pytest.raises(LiveError, match=r"\$server: no series has the label server"):
        live_values(prometheus, BOARD, 0.0, 1.0)


def test_no_prometheus_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = tmp_path / "board.json"
    board.write_text(json.dumps(BOARD), encoding="utf-8")
    with pytest.raises(LiveError, match="127"):
        prometheus_reader("http://127.0.0.1:1", timeout_seconds=2.0)("/api/v1/query", {})
    assert main(["http://127.0.0.1:1", str(board)]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err

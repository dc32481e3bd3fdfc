"""``python -m servoscope.dashboards.live URL [FILE…]``: which queries have no data right now?

Dashboards rot when the series behind them change their names. This runs every query of every
panel against a Prometheus, with the values that the variables have there, and names those that
gave nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servoscope.dashboards.generate import generated_directory
from servoscope.dashboards.inspection import (
    DashboardError,
    PanelQuery,
    expand,
    panel_queries,
    variable_queries,
)

__all__ = ["LiveError", "Silent", "live_values", "main", "prometheus_reader", "silent_queries"]

#: Reads one API path with parameters and gives Prometheus's ``data``.
Reader = Callable[[str, Mapping[str, str | list[str]]], Any]
MAX_ANSWER_BYTES = 64 << 20
_POINTS = 120


class LiveError(Exception):
    """Prometheus could not be asked, or refused a query."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A query without a single finite value, and why."""

    query: PanelQuery
    expanded: str
    why: str

    def __str__(self) -> str:
        """One line for a report."""
        where = f"{self.query.panel_title} [{self.query.ref_id}]"
        return f"{where}: {self.why}: {self.expanded}"


def prometheus_reader(url: str, timeout_seconds: float = 30.0) -> Reader:
    """A reader of the HTTP API below ``url``. Raises ``LiveError`` for every kind of failure."""
    base = url.rstrip("/")

    def read(path: str, parameters: Mapping[str, str | list[str]]) -> Any:
        body = urllib.parse.urlencode(parameters, doseq=True)
        address = f"{base}{path}?{body}"
        try:
            with urllib.request.urlopen(address, timeout=timeout_seconds) as answer:
                text = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read(2000).decode("utf-8", "replace")
            raise LiveError(f"{path}: HTTP {error.code}: {reason}") from error
        except OSError as error:
            raise LiveError(f"{base}: {error}") from error
        if len(text) > MAX_ANSWER_BYTES:
            raise LiveError(f"{path}: answer larger than {MAX_ANSWER_BYTES} bytes")
        try:
            return json.loads(text)["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise LiveError(f"{path}: not a Prometheus answer: {error}") from error

    return read


def live_values(
    read: Reader, dashboard: Mapping[str, Any], start: float, end: float
) -> dict[str, list[str]]:
    """Variable → values that its label has, each listed with the variables before it filled in.

    Raises ``LiveError`` for a variable with no value at all: nothing would be selected.
    """
    values: dict[str, list[str]] = {}
    for variable in variable_queries(dashboard):
        parameters: dict[str, str | list[str]] = {"start": f"{start:.3f}", "end": f"{end:.3f}"}
        if variable.selector:
            parameters["match[]"] = [expand(variable.selector, values, "1m")]
        found = read(f"/api/v1/label/{variable.label}/values", parameters)
        if not found:
            raise LiveError(f"variable ${variable.name}: no series has the label {variable.label}")
        values[variable.name] = sorted(str(value) for value in found)
    return values


def silent_queries(
    read: Reader,
    dashboard: Mapping[str, Any],
    *,
    end: float,
    window_seconds: float = 900.0,
    rate_interval: str = "1m",
    ignore: Iterable[str] = (),
) -> list[Silent]:
    """Run every panel query over the window up to ``end`` (unix seconds); those without data.

    A query has data when one sample of one series is finite. ``ignore``: panel titles to leave out
    (a run on a machine without what the panel shows).
    """
    start = end - window_seconds
    values = live_values(read, dashboard, start, end)
    left_out = set(ignore)
    silent = []
    for query in panel_queries(dashboard):
        if query.panel_title in left_out:
            continue
        range_interval = f"{max(1, round(window_seconds))}s"
        expanded = expand(query.expr, values, rate_interval, range_interval)
        try:
            series = _run(read, query, expanded, start, end)
        except LiveError as error:
            silent.append(Silent(query, expanded, str(error)))
            continue
        if not series:
            silent.append(Silent(query, expanded, "no series"))
        elif not any(math.isfinite(value) for values_ in series for value in values_):
            silent.append(Silent(query, expanded, "no finite value"))
    return silent


def _run(
    read: Reader, query: PanelQuery, expanded: str, start: float, end: float
) -> list[list[float]]:
    if query.instant:
        data = read("/api/v1/query", {"query": expanded, "time": f"{end:.3f}"})
        return [[float(item["value"][1])] for item in data["result"]]
    parameters = {
        "query": expanded,
        "start": f"{start:.3f}",
        "end": f"{end:.3f}",
        "step": f"{max(1.0, (end - start) / _POINTS):.3f}",
    }
    data = read("/api/v1/query_range", parameters)
    return [[float(value) for _, value in item["values"]] for item in data["result"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print silent queries, one a line. Exit code 1 if there is one, 2 if nothing could be asked."""
    parser = argparse.ArgumentParser(prog="servoscope.dashboards.live", description=__doc__)
    parser.add_argument("url", help="Prometheus, e.g. http://127.0.0.1:9090")
    parser.add_argument("files", nargs="*", type=Path, help="dashboards (default: the shipped)")
    parser.add_argument("--window", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--rate-interval", default="1m", help="what $__rate_interval becomes")
    args = parser.parse_args(argv)
    read = prometheus_reader(args.url)
    silent: list[Silent] = []
    asked = 0
    try:
        for path in args.files or sorted(generated_directory().glob("*.json")):
            dashboard = json.loads(path.read_text(encoding="utf-8"))
            asked += len(panel_queries(dashboard))
            silent += silent_queries(
                read,
                dashboard,
                end=time.time(),
                window_seconds=args.window,
                rate_interval=args.rate_interval,
            )
    except (LiveError, DashboardError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in silent)
    sys.stdout.write(f"{asked - len(silent)} of {asked} queries have data\n")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())

"""Sections of the overview about requests: now, latency, slices, outcomes and objectives."""

from __future__ import annotations

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel
from grafana_foundation_sdk.models.units import PercentUnit, RequestsPerSecond, Seconds, Short

from servoscope.dashboards import engine_queries, queries
from servoscope.dashboards.panels import GRID_COLUMNS, Steps, Text, series, slices, stat_value
from servoscope.dashboards.promql import Recorded

__all__ = ["request_sections"]

_HALF, _THIRD, _SIXTH = GRID_COLUMNS // 2, GRID_COLUMNS // 3, GRID_COLUMNS // 6
_GOOD_UP = Steps("red", ((0.95, "yellow"), (0.99, "green")))
_BAD_UP = Steps("green", ((0.001, "yellow"), (0.01, "red")))
_BUDGET = Steps("red", ((0.0, "yellow"), (0.25, "green")))


def request_sections(recorded: Recorded) -> dict[str, list[Builder[Panel]]]:
    """Row title → panels, in the order of the dashboard."""
    return {
        "Now": _now(recorded),
        "Latency by request type": _latency(),
        "By request type, model version and GPU model": _slices(),
        "Outcomes and objectives": _objectives(recorded),
    }


def _now(recorded: Recorded) -> list[Builder[Panel]]:
    return [
        stat_value(
            Text(
                "Requests", "Finished requests a second, whatever their outcome.", RequestsPerSecond
            ),
            queries.requests_per_second(),
            width=_SIXTH,
        ),
        stat_value(
            Text(
                "Error ratio",
                "Errors, timeouts, stuck and rejected (429, 503) requests, of all that the error "
                "objective counts. Probes, other 4xx and disconnects are left out.",
                PercentUnit,
            ),
            queries.error_ratio(),
            width=_SIXTH,
            steps=_BAD_UP,
            decimals=2,
        ),
        stat_value(
            Text(
                "Goodput ratio",
                "Requests that met every objective that counts them, of all finished requests "
                "but probes, other 4xx and unknown ends. A disconnect that came too early to "
                "judge is in the whole, not in the part: the true ratio is never below this one.",
                PercentUnit,
            ),
            queries.goodput_ratio(),
            width=_SIXTH,
            steps=_GOOD_UP,
        ),
        stat_value(
            Text("Engines up", "Engines that answer their sidecar.", Short),
            engine_queries.engines_up(),
            width=_SIXTH,
            steps=Steps("red", ((1.0, "green"),)),
            decimals=0,
        ),
        stat_value(
            Text(
                "Least budget left",
                "Error budget that is left of the objective's window, for the worst objective of "
                "the fleet. Not filtered by the variables.",
                PercentUnit,
            ),
            queries.least_budget_remaining(recorded),
            width=_SIXTH,
            steps=_BUDGET,
        ),
        stat_value(
            Text(
                "KV hit rate",
                "Prompt tokens found in the prefix cache, of those looked up (by tokens).",
                PercentUnit,
            ),
            engine_queries.kv_hit_ratio_now(),
            width=_SIXTH,
        ),
    ]


def _latency() -> list[Builder[Panel]]:
    return [
        series(
            Text(
                "Time to first token",
                "p50 and p99, from the request received to its first generated token, whatever "
                "the outcome. Requests that did not stream are left out: their first token "
                "arrives with the last.",
                Seconds,
            ),
            queries.time_to_first_token(),
            width=_HALF,
        ),
        series(
            Text(
                "Time per output token",
                "p50 and p99 of (last token - first token) / (output tokens - 1), for two output "
                "tokens or more.",
                Seconds,
            ),
            queries.time_per_output_token(),
            width=_HALF,
        ),
        series(
            Text("Queue, p99", "From the request received to its first scheduling.", Seconds),
            queries.queue_time(),
            width=_HALF,
        ),
        series(
            Text(
                "End to end, p99",
                "From the request received to its end, of requests served in full (completed, "
                "length).",
                Seconds,
            ),
            queries.end_to_end(),
            width=_HALF,
        ),
    ]


def _slices() -> list[Builder[Panel]]:
    columns = queries.slice_table()
    ratios = {"Errors", "Goodput"}
    units = {
        title: PercentUnit if title in ratios else Seconds
        for title in columns
        if title != "Requests"
    }
    return [
        slices(
            Text(
                "Slices",
                "One row a request type, model version and GPU model, over the whole time range.",
                Short,
            ),
            columns,
            keys={
                "request_type": "Request type",
                "model_version": "Model version",
                "gpu_model": "GPU model",
            },
            units=units,
        ),
        series(
            Text(
                "Time to first token, p99, by version and GPU",
                "Does a release or a GPU model answer later than another? Requests that did not "
                "stream are left out.",
                Seconds,
            ),
            queries.ttft_by_version_and_gpu(),
            width=_HALF,
        ),
        series(
            Text(
                "Time per output token, p99, by version and GPU",
                "Does a release or a GPU model write slower than another?",
                Seconds,
            ),
            queries.tpot_by_version_and_gpu(),
            width=_HALF,
        ),
    ]


def _objectives(recorded: Recorded) -> list[Builder[Panel]]:
    return [
        series(
            Text(
                "Outcomes",
                "Finished requests a second by how they ended, stacked.",
                RequestsPerSecond,
            ),
            queries.outcomes(),
            width=_HALF,
            stacked=True,
        ),
        series(
            Text(
                "Objectives: good requests",
                "Good of counted, classified when they were observed; no histogram is involved.",
                PercentUnit,
            ),
            queries.objective_good_ratio(),
            width=_HALF,
            highest=1.0,
        ),
        series(
            Text(
                "Far over the threshold",
                "Share of counted requests above factor x threshold. More than 1 % at 1.5 x pages: "
                "the p99 is above 1.5 x the objective.",
                PercentUnit,
            ),
            queries.over_threshold_ratio(),
            width=_THIRD,
        ),
        series(
            Text(
                "Error budget left",
                "Share of the budget that the objective's window still holds; below 0 it is "
                "overspent. By service: not filtered by the variables.",
                PercentUnit,
            ),
            queries.budget_remaining(recorded),
            width=_THIRD,
            lowest=None,
        ),
        series(
            Text(
                "Budget burn",
                "Over five minutes and over an hour. 1 spends the budget exactly over the "
                "objective's window; 14.4 over an hour pages. By service: not filtered by the "
                "variables.",
                Short,
            ),
            queries.burn_rate(recorded),
            width=_THIRD,
        ),
    ]

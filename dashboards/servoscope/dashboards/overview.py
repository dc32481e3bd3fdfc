"""The dashboard "Servoscope overview": by request type, model version and GPU model."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Dashboard, DashboardCursorSync, Panel
from grafana_foundation_sdk.models.table import Options as TableOptions
from grafana_foundation_sdk.models.units import PercentUnit, RequestsPerSecond, Seconds, Short

from servoscope.dashboards import queries
from servoscope.dashboards.panels import (
    GRID_COLUMNS,
    Steps,
    Text,
    series,
    slices,
    stat_value,
    timeline,
)
from servoscope.dashboards.promql import Recorded
from servoscope.dashboards.variables import template_variables
from servoscope.exporters.records import SourceState

__all__ = ["UID", "overview"]

#: Links and runbooks name it: it never changes.
UID = "servoscope-overview"
_HALF, _THIRD, _SIXTH = GRID_COLUMNS // 2, GRID_COLUMNS // 3, GRID_COLUMNS // 6
_GOOD_UP = Steps("red", ((0.95, "yellow"), (0.99, "green")))
_BAD_UP = Steps("green", ((0.001, "yellow"), (0.01, "red")))
_BUDGET = Steps("red", ((0.0, "yellow"), (0.25, "green")))
_STATES = {
    SourceState.OK: ("ok", "green"),
    SourceState.IDLE: ("idle", "blue"),
    SourceState.STALE: ("stale", "orange"),
    SourceState.BAD_VALUE: ("bad value", "purple"),
    SourceState.FAILED: ("failed", "red"),
}


def overview(recorded: Recorded) -> Dashboard:
    """The whole dashboard. Raises ``QueryError`` where a query names what nobody publishes."""
    board = (
        build.Dashboard("Servoscope overview")
        .uid(UID)
        .description(
            "LLM serving by request type, model version and GPU model: latency, outcomes, "
            "objectives, cache, scheduler and the sources that say so."
        )
        .tags(["servoscope", "llm"])
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .variables(list(template_variables()))
    )
    sections: dict[str, list[Builder[Panel]]] = {
        "Now": _now(recorded),
        "Latency by request type": _latency(),
        "By request type, model version and GPU model": _slices(),
        "Outcomes and objectives": _objectives(recorded),
        "Load and cache": _load(),
        "Scheduler and knobs": _engine(),
        "Sources": _sources(),
    }
    for title, panels in sections.items():
        board = board.with_row(build.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return _tidied(board.build())


def _tidied(dashboard: Dashboard) -> Dashboard:
    """Ids by position; without the SDK's defaults that Grafana 12's types no longer know."""
    for number, panel in enumerate(dashboard.panels or [], start=1):
        panel.id_val = number
        if isinstance(panel, Panel) and isinstance(panel.options, TableOptions):
            panel.options.footer = None
    for variable in (dashboard.templating.list_val if dashboard.templating else None) or []:
        variable.auto = variable.auto_count = variable.auto_min = None  # of interval variables
    return dashboard


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
            queries.engines_up(),
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
            queries.kv_hit_ratio_now(),
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


def _load() -> list[Builder[Panel]]:
    return [
        series(
            Text(
                "KV hit rate",
                "Prompt tokens found in the prefix cache (all tiers), of those looked up.",
                PercentUnit,
            ),
            queries.kv_hit_ratio(),
            width=_THIRD,
            highest=1.0,
        ),
        series(
            Text("KV cache in use", "The fullest rank of each engine.", PercentUnit),
            queries.kv_usage(),
            width=_THIRD,
            highest=1.0,
        ),
        series(
            Text(
                "Generated tokens",
                "A second, of finished requests: all of them, and those that met every objective.",
                "tokens/s",
            ),
            queries.tokens_per_second(),
            width=_THIRD,
        ),
        series(
            Text("Running and waiting", "Requests in the engine, as it says itself.", Short),
            queries.running_waiting(),
            width=_HALF,
        ),
        series(
            Text(
                "In flight by phase",
                "Requests received and not ended, as our own sources see them; engines' gauges "
                "may lag seconds behind.",
                Short,
            ),
            queries.in_flight(),
            width=_HALF,
            stacked=True,
        ),
    ]


def _engine() -> list[Builder[Panel]]:
    return [
        series(
            Text(
                "Scheduler CPU",
                "Share of one core inside schedule(), measured in the engine, and what our own "
                "plug-in adds. The engine's process CPU is not it: engines spin while they wait. "
                "Needs the plug-in with SERVOSCOPE_KNOBS=1.",
                PercentUnit,
            ),
            queries.scheduler_cpu(),
            width=_HALF,
        ),
        series(
            Text(
                "Scheduler CPU a step",
                "CPU time of one schedule() call that had work. Needs the plug-in with "
                "SERVOSCOPE_KNOBS=1.",
                Seconds,
            ),
            queries.scheduler_cpu_per_step(),
            width=_HALF,
        ),
        series(
            Text(
                "Chunk: tokens a step",
                "The knob chunk_tokens as read back from the engine, its value at boot, and the "
                "fullest step since the last read, which may not exceed it. Needs the plug-in with "
                "SERVOSCOPE_KNOBS=1.",
                Short,
            ),
            queries.chunk_knob(),
            width=_HALF,
        ),
        series(
            Text("Engine restarts", "Restarts that the sidecar saw in each interval.", Short),
            queries.engine_restarts(),
            width=_HALF,
        ),
    ]


def _sources() -> list[Builder[Panel]]:
    return [
        timeline(
            Text(
                "Source states",
                "Where the numbers come from. Idle is healthy with nothing to report; failed, "
                "stale and bad value are three different faults.",
                Short,
            ),
            queries.source_states(),
            width=_HALF,
            states={queries.SOURCE_STATE_CODES[state]: look for state, look in _STATES.items()},
        ),
        series(
            Text("Source age", "Since each source last gave a good reading.", Seconds),
            queries.source_age(),
            width=_HALF,
        ),
    ]

"""Sections of the overview about engines: load and cache, scheduler and knobs, our sources."""

from __future__ import annotations

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel
from grafana_foundation_sdk.models.units import PercentUnit, Seconds, Short

from servoscope.dashboards import engine_queries
from servoscope.dashboards.panels import GRID_COLUMNS, Text, series, timeline
from servoscope.exporters.records import SourceState

__all__ = ["engine_sections"]

_HALF, _THIRD = GRID_COLUMNS // 2, GRID_COLUMNS // 3
_STATES = {
    SourceState.OK: ("ok", "green"),
    SourceState.IDLE: ("idle", "blue"),
    SourceState.STALE: ("stale", "orange"),
    SourceState.BAD_VALUE: ("bad value", "purple"),
    SourceState.FAILED: ("failed", "red"),
}


def engine_sections() -> dict[str, list[Builder[Panel]]]:
    """Row title → panels, in the order of the dashboard."""
    return {
        "Load and cache": _load(),
        "Scheduler and knobs": _engine(),
        "Sources": _sources(),
    }


def _load() -> list[Builder[Panel]]:
    return [
        series(
            Text(
                "KV hit rate",
                "Prompt tokens found in the prefix cache (all tiers), of those looked up.",
                PercentUnit,
            ),
            engine_queries.kv_hit_ratio(),
            width=_THIRD,
            highest=1.0,
        ),
        series(
            Text("KV cache in use", "The fullest rank of each engine.", PercentUnit),
            engine_queries.kv_usage(),
            width=_THIRD,
            highest=1.0,
        ),
        series(
            Text(
                "Generated tokens",
                "A second, of finished requests: all of them, and those that met every objective.",
                "tokens/s",
            ),
            engine_queries.tokens_per_second(),
            width=_THIRD,
        ),
        series(
            Text("Running and waiting", "Requests in the engine, as it says itself.", Short),
            engine_queries.running_waiting(),
            width=_HALF,
        ),
        series(
            Text(
                "In flight by phase",
                "Requests received and not ended, as our own sources see them; engines' gauges "
                "may lag seconds behind.",
                Short,
            ),
            engine_queries.in_flight(),
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
            engine_queries.scheduler_cpu(),
            width=_HALF,
        ),
        series(
            Text(
                "Scheduler CPU a step",
                "CPU time of one schedule() call that had work. Needs the plug-in with "
                "SERVOSCOPE_KNOBS=1.",
                Seconds,
            ),
            engine_queries.scheduler_cpu_per_step(),
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
            engine_queries.chunk_knob(),
            width=_HALF,
        ),
        series(
            Text("Engine restarts", "Restarts that the sidecar saw in each interval.", Short),
            engine_queries.engine_restarts(),
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
            engine_queries.source_states(),
            width=_HALF,
            states={
                engine_queries.SOURCE_STATE_CODES[state]: look for state, look in _STATES.items()
            },
        ),
        series(
            Text("Source age", "Since each source last gave a good reading.", Seconds),
            engine_queries.source_age(),
            width=_HALF,
        ),
    ]

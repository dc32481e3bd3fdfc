"""What the overview asks about engines: load, cache, scheduler, knobs, and our sources."""

from __future__ import annotations

from servoscope.dashboards.promql import (
    Query,
    aggregate,
    increase,
    rate,
    ratio,
    selector,
    zero_where_absent,
)
from servoscope.exporters.records import SourceState

__all__ = [
    "SOURCE_STATE_CODES",
    "chunk_knob",
    "engine_restarts",
    "engines_up",
    "in_flight",
    "kv_hit_ratio",
    "kv_hit_ratio_now",
    "kv_usage",
    "running_waiting",
    "scheduler_cpu",
    "scheduler_cpu_per_step",
    "source_age",
    "source_states",
    "tokens_per_second",
]

#: One number a state, so that a state timeline can colour it. 0 is not used: it reads as "none".
SOURCE_STATE_CODES: dict[SourceState, int] = {
    SourceState.OK: 1,
    SourceState.IDLE: 2,
    SourceState.STALE: 3,
    SourceState.BAD_VALUE: 4,
    SourceState.FAILED: 5,
}

_BY_ENGINE = ("server",)


# ---- load and cache ----------------------------------------------------------------------------
def engines_up() -> tuple[Query, ...]:
    """Engines that answer."""
    return (Query(expr=aggregate("sum", "engine_up"), legend="up"),)


def kv_hit_ratio_now() -> tuple[Query, ...]:
    """Prefix-cache hits of all engines together, weighted by tokens."""
    return (Query(expr=_kv_hits(()), legend="hits"),)


def kv_hit_ratio() -> tuple[Query, ...]:
    """Tokens found in the prefix cache, of those looked up, by engine."""
    return (Query(expr=_kv_hits(_BY_ENGINE), legend="{{server}}"),)


def kv_usage() -> tuple[Query, ...]:
    """The fullest rank of each engine."""
    return (Query(expr=aggregate("max", "kv_usage_ratio", _BY_ENGINE), legend="{{server}}"),)


def running_waiting() -> tuple[Query, ...]:
    """The engine's own batch and queue."""
    return (
        Query(expr=aggregate("sum", "running", _BY_ENGINE), legend="running {{server}}"),
        Query(expr=aggregate("sum", "waiting", _BY_ENGINE), legend="waiting {{server}}"),
    )


def in_flight() -> tuple[Query, ...]:
    """Requests received and not ended, as our sources see them."""
    return (Query(expr=aggregate("sum", "requests_in_flight", ("phase",)), legend="{{phase}}"),)


def tokens_per_second() -> tuple[Query, ...]:
    """Generated tokens: all, and those of requests that met every objective."""
    return (
        Query(expr=rate("throughput_tokens_total"), legend="throughput"),
        Query(expr=rate("goodput_tokens_total"), legend="goodput"),
    )


# ---- engine and control ------------------------------------------------------------------------
def scheduler_cpu() -> tuple[Query, ...]:
    """Share of one core inside schedule(): engines spin while they wait, so process CPU is not it."""
    by = ("server", "rank")
    return (
        Query(expr=rate("scheduler_cpu_seconds_total", by), legend="{{server}} rank {{rank}}"),
        Query(
            expr=rate("plugin_cpu_seconds_total", by),
            legend="our plug-in, {{server}} rank {{rank}}",
        ),
    )


def scheduler_cpu_per_step() -> tuple[Query, ...]:
    """CPU seconds a scheduler step."""
    by = ("server", "rank")
    expr = ratio(rate("scheduler_cpu_seconds_total", by), rate("scheduler_steps_total", by))
    return (Query(expr=expr, legend="{{server}} rank {{rank}}"),)


def chunk_knob() -> tuple[Query, ...]:
    """The token budget of a step: in force, at boot, and the fullest step since the last read."""
    by = ("server", "rank")
    chunk = '="chunk_tokens"'
    return (
        Query(
            expr=aggregate("min", "knob_value", by, knob=chunk),
            legend="in force, {{server}} rank {{rank}}",
        ),
        Query(
            expr=aggregate("min", "knob_boot_value", by, knob=chunk),
            legend="at boot, {{server}} rank {{rank}}",
        ),
        Query(
            expr=aggregate("max", "step_tokens_max", by),
            legend="fullest step, {{server}} rank {{rank}}",
        ),
    )


def engine_restarts() -> tuple[Query, ...]:
    """Restarts seen by the sidecar, in whole numbers."""
    expr = f"round({increase('engine_restarts_total', _BY_ENGINE)})"
    return (Query(expr=expr, legend="{{server}}"),)


# ---- sources -----------------------------------------------------------------------------------
def source_states() -> tuple[Query, ...]:
    """The state in force of each source, as its number in ``SOURCE_STATE_CODES``."""
    states = [
        f"{code} * ({selector('source_state', state=f'={_quoted(state)}')} == 1)"
        for state, code in SOURCE_STATE_CODES.items()
    ]
    expr = f"max by (server, source) ({' or '.join(states)})"
    return (Query(expr=expr, legend="{{server}} {{source}}"),)


def source_age() -> tuple[Query, ...]:
    """Seconds since each source last gave a good reading."""
    last = aggregate("max", "source_last_success_timestamp_seconds", ("server", "source"))
    return (Query(expr=f"time() - {last}", legend="{{server}} {{source}}"),)


# ---- helpers -----------------------------------------------------------------------------------
def _kv_hits(by: tuple[str, ...]) -> str:
    hits, queries = rate("kv_hit_tokens_total", by), rate("kv_query_tokens_total", by)
    return ratio(zero_where_absent(hits, queries), queries)


def _quoted(text: str) -> str:
    return f'"{text}"'

"""What the overview asks. Panels say how an answer looks; here is only what is asked.

Shares leave out what the objectives leave out: probes, a client's own 4xx, and requests whose end
nobody saw (docs: outcomes). Each function returns the targets of one panel.
"""

from __future__ import annotations

from servoscope.dashboards.promql import (
    RANGE_WINDOW,
    Query,
    Recorded,
    aggregate,
    increase,
    quantile,
    rate,
    ratio,
    selector,
    zero_where_absent,
)
from servoscope.exporters.records import Outcome, SourceState

__all__ = [
    "SLICE_BY",
    "SOURCE_STATE_CODES",
    "budget_remaining",
    "burn_rate",
    "chunk_knob",
    "end_to_end",
    "engine_restarts",
    "engines_up",
    "error_ratio",
    "goodput_ratio",
    "in_flight",
    "kv_hit_ratio",
    "kv_hit_ratio_now",
    "kv_usage",
    "least_budget_remaining",
    "objective_good_ratio",
    "outcomes",
    "over_threshold_ratio",
    "queue_time",
    "requests_per_second",
    "running_waiting",
    "scheduler_cpu",
    "scheduler_cpu_per_step",
    "slice_table",
    "source_age",
    "source_states",
    "time_per_output_token",
    "time_to_first_token",
    "tokens_per_second",
    "tpot_by_version_and_gpu",
    "ttft_by_version_and_gpu",
]

#: What the slice table is keyed by.
SLICE_BY: tuple[str, ...] = ("request_type", "model_version", "gpu_model")

#: One number a state, so that a state timeline can colour it. 0 is not used: it reads as "none".
SOURCE_STATE_CODES: dict[SourceState, int] = {
    SourceState.OK: 1,
    SourceState.IDLE: 2,
    SourceState.STALE: 3,
    SourceState.BAD_VALUE: 4,
    SourceState.FAILED: 5,
}

_BAD = '=~"' + "|".join([Outcome.ERROR, Outcome.TIMEOUT, Outcome.STUCK, Outcome.REJECTED]) + '"'
_LEFT_OUT = '!~"' + "|".join([Outcome.CLIENT_ERROR, Outcome.UNKNOWN]) + '"'
_ENDED_BY_CLIENT = (Outcome.CLIENT_DISCONNECT, Outcome.CANCELLED)
_IN_ERROR_SLI = '!~"' + "|".join([Outcome.CLIENT_ERROR, Outcome.UNKNOWN, *_ENDED_BY_CLIENT]) + '"'
_NO_PROBES = '!="probe"'
#: Not ``="true"``: inside an engine a source may not see whether the client streams ("unknown").
_NOT_WHOLE = '!="false"'
_BY_TYPE = ("request_type",)
_BY_VERSION_AND_GPU = ("model_version", "gpu_model")
_BY_ENGINE = ("server",)


# ---- now ---------------------------------------------------------------------------------------
def requests_per_second() -> tuple[Query, ...]:
    """Finished requests, whatever their outcome."""
    return (Query(expr=rate("requests_total"), legend="requests/s"),)


def error_ratio() -> tuple[Query, ...]:
    """Requests that the service failed, of those that the error objective counts."""
    whole = rate("requests_total", outcome=_IN_ERROR_SLI, request_type=_NO_PROBES)
    bad = rate("requests_total", outcome=_BAD, request_type=_NO_PROBES)
    return (Query(expr=ratio(zero_where_absent(bad, whole), whole), legend="errors"),)


def goodput_ratio() -> tuple[Query, ...]:
    """Requests that met every objective, of those that objectives may count."""
    return (Query(expr=_goodput(()), legend="goodput"),)


def engines_up() -> tuple[Query, ...]:
    """Engines that answer."""
    return (Query(expr=aggregate("sum", "engine_up"), legend="up"),)


def kv_hit_ratio_now() -> tuple[Query, ...]:
    """Prefix-cache hits of all engines together, weighted by tokens."""
    return (Query(expr=_kv_hits(()), legend="hits"),)


def least_budget_remaining(recorded: Recorded) -> tuple[Query, ...]:
    """The objective that is closest to (or furthest past) the end of its budget."""
    budget = recorded.select("slo:period_error_budget_remaining:ratio")
    return (Query(expr=f"min({budget})", legend="least budget left"),)


# ---- latency -----------------------------------------------------------------------------------
def time_to_first_token() -> tuple[Query, ...]:
    """Not of requests that did not stream: there the first token arrives with the last."""
    return _p50_p99("time_to_first_token_seconds", _BY_TYPE, streaming=_NOT_WHOLE)


def time_per_output_token() -> tuple[Query, ...]:
    """Two output tokens or more."""
    return _p50_p99("time_per_output_token_seconds", _BY_TYPE)


def queue_time() -> tuple[Query, ...]:
    """p99 of waiting before the first scheduling."""
    return (_p99("queue_seconds", _BY_TYPE, "{{request_type}}"),)


def end_to_end() -> tuple[Query, ...]:
    """p99 from request received to its end, of requests served in full."""
    return (_p99("e2e_seconds", _BY_TYPE, "{{request_type}}"),)


# ---- slices ------------------------------------------------------------------------------------
def slice_table() -> dict[str, Query]:
    """Column title → query; one row a request type, model version and GPU model."""
    requests = increase("requests_total", SLICE_BY, RANGE_WINDOW)
    counted = increase(
        "requests_total", SLICE_BY, RANGE_WINDOW, outcome=_IN_ERROR_SLI, request_type=_NO_PROBES
    )
    bad = increase("requests_total", SLICE_BY, RANGE_WINDOW, outcome=_BAD, request_type=_NO_PROBES)
    expressions = {
        "Requests": requests,
        "Errors": ratio(zero_where_absent(bad, counted), counted),
        "Goodput": _goodput(SLICE_BY, RANGE_WINDOW),
        "TTFT p50": _slice_quantile(0.5, "time_to_first_token_seconds", streaming=_NOT_WHOLE),
        "TTFT p99": _slice_quantile(0.99, "time_to_first_token_seconds", streaming=_NOT_WHOLE),
        "TPOT p50": _slice_quantile(0.5, "time_per_output_token_seconds"),
        "TPOT p99": _slice_quantile(0.99, "time_per_output_token_seconds"),
        "Queue p99": _slice_quantile(0.99, "queue_seconds"),
        "E2E p99": _slice_quantile(0.99, "e2e_seconds"),
    }
    return {
        title: Query(expr=expr, legend=title, instant=True) for title, expr in expressions.items()
    }


def ttft_by_version_and_gpu() -> tuple[Query, ...]:
    """p99, for a comparison of releases and of GPU models."""
    return (
        _p99(
            "time_to_first_token_seconds",
            _BY_VERSION_AND_GPU,
            "{{model_version}} on {{gpu_model}}",
            streaming=_NOT_WHOLE,
        ),
    )


def tpot_by_version_and_gpu() -> tuple[Query, ...]:
    """p99, for a comparison of releases and of GPU models."""
    return (
        _p99(
            "time_per_output_token_seconds",
            _BY_VERSION_AND_GPU,
            "{{model_version}} on {{gpu_model}}",
        ),
    )


# ---- outcomes and objectives -------------------------------------------------------------------
def outcomes() -> tuple[Query, ...]:
    """Finished requests by how they ended."""
    return (Query(expr=rate("requests_total", ("outcome",)), legend="{{outcome}}"),)


def objective_good_ratio() -> tuple[Query, ...]:
    """Good of counted, classified when they were observed: no bucket is involved."""
    by = ("service", "objective")
    expr = ratio(
        zero_where_absent(rate("slo_good_total", by), rate("slo_total", by)), rate("slo_total", by)
    )
    return (Query(expr=expr, legend="{{service}} {{objective}}"),)


def over_threshold_ratio() -> tuple[Query, ...]:
    """Share above factor x threshold: above 1 % at factor 1.5 pages."""
    by = ("service", "objective")
    over = rate("slo_over_total", (*by, "factor"))
    whole = rate("slo_total", by)
    expr = f"{over} / on (service, objective) group_left () ({whole} > 0)"
    return (Query(expr=expr, legend="{{service}} {{objective}} over {{factor}} x threshold"),)


def budget_remaining(recorded: Recorded) -> tuple[Query, ...]:
    """Share of the error budget that the window still holds; below 0 it is overspent."""
    expr = recorded.select("slo:period_error_budget_remaining:ratio")
    return (Query(expr=expr, legend="{{service}} {{objective}}"),)


def burn_rate(recorded: Recorded) -> tuple[Query, ...]:
    """How fast the budget goes: 1 spends it exactly over the window, 14.4 in 2 of 30 days."""
    now = recorded.select("slo:current_burn_rate:ratio")
    hour = recorded.select("slo:sli_error:ratio_rate1h")
    budget = recorded.select("slo:error_budget:ratio")
    key = "{{service}} {{objective}}"
    return (
        Query(expr=now, legend=f"5 min, {key}"),
        Query(expr=f"{hour} / on (sloth_id) group_left () {budget}", legend=f"1 h, {key}"),
    )


# ---- load and cache ----------------------------------------------------------------------------
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
def _p99(name: str, by: tuple[str, ...], legend: str, **matchers: str) -> Query:
    return Query(expr=quantile(0.99, name, by, **matchers), legend=legend)


def _p50_p99(name: str, by: tuple[str, ...], **matchers: str) -> tuple[Query, ...]:
    keys = " ".join(f"{{{{{label}}}}}" for label in by)
    return (
        Query(expr=quantile(0.5, name, by, **matchers), legend=f"p50 {keys}"),
        _p99(name, by, f"p99 {keys}", **matchers),
    )


def _slice_quantile(q: float, name: str, **matchers: str) -> str:
    return quantile(q, name, SLICE_BY, RANGE_WINDOW, **matchers)


def _goodput(by: tuple[str, ...], window: str | None = None) -> str:
    def read(name: str, **matchers: str) -> str:
        if window is None:
            return rate(name, by, **matchers)
        return increase(name, by, window, **matchers)

    whole = read("requests_total", outcome=_LEFT_OUT, request_type=_NO_PROBES)
    good = read("goodput_requests_total", request_type=_NO_PROBES)
    return ratio(zero_where_absent(good, whole), whole)


def _kv_hits(by: tuple[str, ...]) -> str:
    hits, queries = rate("kv_hit_tokens_total", by), rate("kv_query_tokens_total", by)
    return ratio(zero_where_absent(hits, queries), queries)


def _quoted(text: str) -> str:
    return f'"{text}"'

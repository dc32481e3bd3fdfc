"""What the overview asks about requests. How an answer looks is in ``request_sections``.

Shares leave out what the objectives leave out: probes, a client's own 4xx, and requests whose end
nobody saw (docs: outcomes). Each function returns the targets of one panel.
"""

from __future__ import annotations

from servoscope.dashboards.promql import (
    RANGE_WINDOW,
    Query,
    Recorded,
    increase,
    quantile,
    rate,
    ratio,
    zero_where_absent,
)
from servoscope.exporters.records import Outcome

__all__ = [
    "SLICE_BY",
    "budget_remaining",
    "burn_rate",
    "end_to_end",
    "error_ratio",
    "goodput_ratio",
    "least_budget_remaining",
    "objective_good_ratio",
    "outcomes",
    "over_threshold_ratio",
    "queue_time",
    "requests_per_second",
    "slice_table",
    "time_per_output_token",
    "time_to_first_token",
    "tpot_by_version_and_gpu",
    "ttft_by_version_and_gpu",
]

#: What the slice table is keyed by.
SLICE_BY: tuple[str, ...] = ("request_type", "model_version", "gpu_model")

_BAD = '=~"' + "|".join([Outcome.ERROR, Outcome.TIMEOUT, Outcome.STUCK, Outcome.REJECTED]) + '"'
_LEFT_OUT = '!~"' + "|".join([Outcome.CLIENT_ERROR, Outcome.UNKNOWN]) + '"'
_ENDED_BY_CLIENT = (Outcome.CLIENT_DISCONNECT, Outcome.CANCELLED)
_IN_ERROR_SLI = '!~"' + "|".join([Outcome.CLIENT_ERROR, Outcome.UNKNOWN, *_ENDED_BY_CLIENT]) + '"'
_NO_PROBES = '!="probe"'
#: Not ``="true"``: inside an engine a source may not see whether the client streams ("unknown").
_NOT_WHOLE = '!="false"'
_BY_TYPE = ("request_type",)
_BY_VERSION_AND_GPU = ("model_version", "gpu_model")


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

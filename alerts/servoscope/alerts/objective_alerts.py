"""Alert rules of one objective: far over its threshold, fast budget burn, no data. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from servoscope.alerts.burn import page_legs
from servoscope.alerts.duration import format_duration, prometheus_duration
from servoscope.alerts.promql import first_value, matchers, number, selector
from servoscope.alerts.recordings import SLICE_LABELS, series_labels
from servoscope.alerts.spec import OVER_FACTOR, Sli
from servoscope.exporters.catalog import metric

if TYPE_CHECKING:
    from collections.abc import Mapping

    from servoscope.alerts.burn import BurnLeg
    from servoscope.alerts.settings import RuleSettings
    from servoscope.alerts.spec import Objective

__all__ = ["absent_alert", "alert", "burn_alert", "over_alert"]

Rule = dict[str, Any]

_WORDS = {
    Sli.TIME_TO_FIRST_TOKEN: "time to first token",
    Sli.TIME_PER_OUTPUT_TOKEN: "time per output token",
    Sli.E2E: "time to the complete answer",
    Sli.ERROR_RATIO: "error ratio",
}
_HISTOGRAMS = {
    Sli.TIME_TO_FIRST_TOKEN: "time_to_first_token_seconds",
    Sli.TIME_PER_OUTPUT_TOKEN: "time_per_output_token_seconds",
    Sli.E2E: "e2e_seconds",
}


def alert(
    name: str,
    expr: str,
    *,
    tier: str,
    pending_seconds: int,
    summary: str,
    description: str,
    settings: RuleSettings,
    labels: Mapping[str, str] = MappingProxyType({}),
    dashboard_query: str = "",
) -> Rule:
    """One alerting rule with the labels and annotations that every alert of ours carries."""
    severity = {"page": "critical", "ticket": "warning", "capacity": "info"}[tier]
    return {
        "alert": name,
        "expr": expr,
        "for": prometheus_duration(pending_seconds),
        "keep_firing_for": prometheus_duration(settings.keep_firing_seconds),
        "labels": {"severity": severity, "tier": tier, **labels},
        "annotations": {
            "summary": summary,
            "description": description,
            "runbook_url": f"{settings.runbook_base_url}/{name}.md",
            "dashboard_url": f"{settings.dashboard_url}?from=now-1h&to=now{dashboard_query}",
        },
    }


def over_alert(objective: Objective, settings: RuleSettings) -> Rule:
    """Page: more than 1 % of requests are above 1.5 x the threshold, now and for some minutes."""
    if objective.threshold_seconds is None:
        raise ValueError(f"{objective.id} has no threshold")
    window = prometheus_duration(settings.over_window_seconds)
    confirm = prometheus_duration(settings.confirm_window_seconds)
    share = number(settings.over_share)
    per_window = str(settings.over_window_seconds)

    def series(name: str) -> str:
        return selector(name, {"sloth_id": objective.id})

    expr = (
        f"{series(f'servoscope:slo_over:ratio_rate{window}')} > {share}\n"
        "and\n"
        f"{series(f'servoscope:slo_over:ratio_rate{confirm}')} > {share}\n"
        "and\n"
        f"{series(f'servoscope:slo_events:rate{window}')} * {per_window}"
        f" >= {settings.over_minimum_events}\n"
        "and\n"
        f"{series(f'servoscope:slo_over_events:rate{window}')} * {per_window}"
        f" >= {settings.over_minimum_over}"
    )
    limit = format_duration(round(OVER_FACTOR * objective.threshold_seconds, 9))
    promised = format_duration(objective.threshold_seconds)
    what = _WORDS[objective.sli]
    return alert(
        "ServoscopeLatencyFarOverSlo",
        expr,
        tier="page",
        pending_seconds=settings.pending_seconds,
        summary=(
            f"{objective.service}: {what} is above {limit} for "
            "{{ $value | humanizePercentage }} of requests"
        ),
        description=(
            f"Objective {objective.name} promises {promised} for "
            f"{100 * objective.target_ratio:g} % of requests{_scope(objective)}. Over the last "
            f"{window}, {{{{ $value | humanizePercentage }}}} took longer than {limit} "
            f"({number(OVER_FACTOR)} x); {number(100 * settings.over_share)} % is allowed. "
            f"p99 now: {_p99(objective, window)}. {_budget_left(objective)} "
            f"{_worst(objective, 'servoscope:slo_over_by_slice:ratio_rate5m')}"
        ),
        settings=settings,
        labels=series_labels(objective),
        dashboard_query=_dashboard_query(objective),
    )


def burn_alert(objective: Objective, settings: RuleSettings) -> Rule:
    """Page: the budget burns so fast that it will not last. Two legs, one alert: one page."""
    legs = page_legs(objective)
    expr = "\nor\n".join(_leg_expr(objective, leg, settings) for leg in legs)
    words = " or ".join(
        f"{number(leg.factor)} x over {format_duration(leg.long_seconds)} and "
        f"{format_duration(leg.short_seconds)}"
        for leg in legs
    )
    burn = (
        "{{ with printf "
        f'"%f / {number(objective.budget_ratio)}" $value | query }}}}'
        '{{ with first . }}{{ . | value | printf "%.1f" }}{{ end }}{{ end }}'
    )
    return alert(
        "ServoscopeErrorBudgetFastBurn",
        expr,
        tier="page",
        pending_seconds=settings.pending_seconds,
        summary=(
            f"{objective.service}: {objective.name} burns its error budget, "
            "{{ $value | humanizePercentage }} of requests are bad"
        ),
        description=(
            f"Objective {objective.name} ({_promise(objective)}{_scope(objective)}) allows "
            f"{number(100 * objective.budget_ratio)} % bad requests over "
            f"{format_duration(objective.window_seconds)}; "
            f"{{{{ $value | humanizePercentage }}}} are bad, {burn} x the budget. Pages above "
            f"{words}. {_budget_left(objective)} "
            f"{_worst(objective, 'servoscope:slo_error_by_slice:ratio_rate5m')}"
        ),
        settings=settings,
        labels=series_labels(objective),
        dashboard_query=_dashboard_query(objective),
    )


def absent_alert(objective: Objective, settings: RuleSettings) -> Rule:
    """Ticket: no sidecar evaluates this objective any more, though one did within a day."""
    select = {"service": objective.service, "objective": objective.name}
    target = selector(metric("slo_target_ratio").full_name, select)
    by = "count by (service, objective)"
    expr = f"{by} (last_over_time({target}[1d]))\nunless\n{by} ({target})"
    return alert(
        "ServoscopeObjectiveAbsent",
        expr,
        tier="ticket",
        pending_seconds=settings.absent_pending_seconds,
        summary=f"{objective.service}: nobody measures {objective.name} any more",
        description=(
            f"No sidecar has published objective {objective.name} for "
            f"{format_duration(settings.absent_pending_seconds)}; within the last day "
            "{{ $value }} did. Its alerts are blind: quiet does not mean well."
        ),
        settings=settings,
        labels=series_labels(objective),
        dashboard_query=_dashboard_query(objective),
    )


def _leg_expr(objective: Objective, leg: BurnLeg, settings: RuleSettings) -> str:
    long, short = prometheus_duration(leg.long_seconds), prometheus_duration(leg.short_seconds)
    confirm = prometheus_duration(settings.confirm_window_seconds)
    chosen = {"sloth_id": objective.id}

    def ratio(window: str, comparison: str) -> str:
        series = selector(f"slo:sli_error:ratio_rate{window}", chosen)
        return f"max without (sloth_window) ({series} {comparison})"

    def events(kind: str, window: str, seconds: int, at_least: int) -> str:
        series = selector(f"servoscope:{kind}:rate{window}", chosen)
        return f"{series} * {seconds} >= {at_least}"

    threshold = f"> {number(leg.threshold_ratio)}"
    mostly_bad = f">= {number(settings.burn_minimum_bad_ratio)}"
    minimum = events("slo_events", long, leg.long_seconds, settings.burn_minimum_events)
    minimum_bad = events("slo_bad_events", long, leg.long_seconds, settings.burn_minimum_bad)

    def recovered(window: str, seconds: int) -> str:
        enough = events("slo_events", window, seconds, leg.recovery_events)
        healthy = ratio(window, f"<= {number(objective.budget_ratio)}")
        return f"{healthy}\n    and\n    {enough}"

    recent = {confirm: settings.confirm_window_seconds, "5m": 300}
    over = "\n    or\n    ".join(recovered(*window) for window in recent.items())
    return (
        "(\n"
        f"  {ratio(long, threshold)}\n"
        f"  and\n  {ratio(short, threshold)}\n"
        # Enough requests for a ratio to mean something; or few, and most of them failed.
        f"  and (\n    {minimum}\n    or\n    {minimum_bad}\n"
        f"    and\n    {ratio(long, mostly_bad)}\n  )\n"
        # Over: the last minutes had enough requests to show it, and kept within the budget.
        f"  unless (\n    {over}\n  )\n"
        ")"
    )


def _promise(objective: Objective) -> str:
    share = f"{100 * objective.target_ratio:g} %"
    if objective.threshold_seconds is None:
        return f"{share} answered without error"
    within = format_duration(objective.threshold_seconds)
    return f"{share} with {_WORDS[objective.sli]} within {within}"


def _scope(objective: Objective) -> str:
    if not objective.where:
        return ""
    parts = (f"{label} {' or '.join(values)}" for label, values in objective.where.items())
    return f" where {', '.join(parts)}".replace("{{", "{ {")


def _p99(objective: Objective, window: str) -> str:
    # A histogram carries no tenant; an objective on one gets the p99 of all.
    where = {k: v for k, v in objective.where.items() if k != "tenant"}
    if any("`" in value for values in where.values() for value in values):
        return "see the dashboard"
    bucket = f"{metric(_HISTOGRAMS[objective.sli]).full_name}_bucket"
    chosen = f"{bucket}{{{matchers(where)}}}" if where else bucket
    expr = f"histogram_quantile(0.99, sum by (le) (rate({chosen}[{window}]) >= 0))"
    return first_value(expr, "{{ . | value | humanizeDuration }}", "unknown")


def _budget_left(objective: Objective) -> str:
    expr = selector("slo:period_error_budget_remaining:ratio", {"sloth_id": objective.id})
    left = first_value(expr, "{{ . | value | humanizePercentage }}", "unknown")
    return f"Budget left: {left}."


def _worst(objective: Objective, series: str) -> str:
    select = {"service": objective.service, "objective": objective.name}
    parts = ", ".join(f'{label} {{{{ . | label "{label}" }}}}' for label in SLICE_LABELS)
    form = f"{parts}: {{{{ . | value | humanizePercentage }}}}"
    return f"Worst slice: {first_value(f'topk(1, {selector(series, select)})', form, 'unknown')}."


def _dashboard_query(objective: Objective) -> str:
    # The overview's variables are labels; `tenant`, `engine` and `streaming` are none of them.
    return "".join(
        f"&var-{label}={quote(value, safe='')}"
        for label in ("model_name", "model_version", "gpu_model", "request_type", "server")
        for value in objective.where.get(label, ())
    )

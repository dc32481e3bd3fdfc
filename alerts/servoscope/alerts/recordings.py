"""Recording rules of one spec: what the alerts compare and what dashboards draw. Pure.

Names and labels of ``slo:*`` and ``sloth_slo_info`` are those of sloth, so that dashboards made for
it work; ``servoscope:*`` are ours. Three properties hold in every rule:

* a NaN of one series is left out (``>= 0`` is false for it), so one bad sample cannot spoil a sum;
* no traffic gives no ratio, never 0/0;
* ``good`` or ``over`` without a series yet count as zero, so a service that fails from its first
  request on has an error ratio of 1, not none.

Windows up to 6 h are rates of the raw counters (reset-safe). Longer ones average the recorded rates
of bad and of all events and divide: weighted by traffic, one series each, cheap over 30 days.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servoscope.alerts.duration import prometheus_duration
from servoscope.alerts.promql import number, selector
from servoscope.alerts.spec import OVER_FACTOR
from servoscope.exporters.catalog import metric

if TYPE_CHECKING:
    from servoscope.alerts.settings import RuleSettings
    from servoscope.alerts.spec import Objective, Spec

__all__ = [
    "LONG_WINDOWS_SECONDS",
    "RAW_WINDOWS_SECONDS",
    "SLICE_LABELS",
    "long_recordings",
    "meta_recordings",
    "raw_recordings",
    "series_labels",
    "slice_recordings",
]

RAW_WINDOWS_SECONDS: tuple[int, ...] = (300, 1800, 3600, 7200, 21_600)
LONG_WINDOWS_SECONDS: tuple[int, ...] = (86_400, 259_200)
SLICE_LABELS = ("model_name", "model_version", "request_type", "gpu_model")

_TOTAL = metric("slo_total").full_name
_GOOD = metric("slo_good_total").full_name
_OVER = metric("slo_over_total").full_name

Rule = dict[str, Any]


def series_labels(objective: Objective) -> dict[str, str]:
    """Labels of every recorded series of ``objective``."""
    return {
        "sloth_id": objective.id,
        "sloth_service": objective.service,
        "sloth_slo": objective.name,
        "service": objective.service,
        "objective": objective.name,
        "sli": objective.sli.value,
    }


def raw_recordings(objective: Objective, settings: RuleSettings) -> list[Rule]:
    """Rates and error ratios over the windows that the pages compare."""
    labels = series_labels(objective)
    select = {"service": objective.service, "objective": objective.name}
    rules: list[Rule] = []
    confirm = settings.confirm_window_seconds
    for seconds in sorted({confirm, settings.over_window_seconds, *RAW_WINDOWS_SECONDS}):
        window = prometheus_duration(seconds)
        all_events = f"rate({selector(_TOTAL, select)}[{window}])"
        good = f"rate({selector(_GOOD, select)}[{window}])"
        bad = f"sum(\n  clamp_min({all_events} - ({good} or 0 * {all_events}), 0) >= 0\n)"
        rules.append(
            _record(f"servoscope:slo_events:rate{window}", f"sum({all_events} >= 0)", labels)
        )
        rules.append(_record(f"servoscope:slo_bad_events:rate{window}", bad, labels))
        rules.append(_error_ratio(objective, window))
    if objective.sli.is_latency:
        over_select = {**select, "factor": number(OVER_FACTOR)}
        for seconds in (settings.over_window_seconds, confirm):
            window = prometheus_duration(seconds)
            events = selector(f"servoscope:slo_events:rate{window}", {"sloth_id": objective.id})
            over = f"sum(rate({selector(_OVER, over_select)}[{window}]) >= 0)"
            expr = f"{over}\nor\nsum(0 * {events})"
            rules.append(_record(f"servoscope:slo_over_events:rate{window}", expr, labels))
            rules.append(
                _record(
                    f"servoscope:slo_over:ratio_rate{window}",
                    _ratio(objective, "servoscope:slo_over_events", window),
                    labels,
                )
            )
    return rules


def long_recordings(objective: Objective) -> list[Rule]:
    """The same over a day, three days and the objective's own window."""
    labels = series_labels(objective)
    rules: list[Rule] = []
    for seconds in sorted({*LONG_WINDOWS_SECONDS, objective.window_seconds}):
        window = prometheus_duration(seconds)
        for name in ("servoscope:slo_events", "servoscope:slo_bad_events"):
            base = selector(f"{name}:rate5m", {"sloth_id": objective.id})
            expr = f"avg_over_time({base}[{window}])"
            rules.append(_record(f"{name}:rate{window}", expr, labels))
        rules.append(_error_ratio(objective, window))
    return rules


def meta_recordings(objective: Objective) -> list[Rule]:
    """What the objective is, how fast it burns, and what is left of its budget."""
    labels = series_labels(objective)
    chosen = {"sloth_id": objective.id}
    budget = number(objective.budget_ratio)
    period = prometheus_duration(objective.window_seconds)
    days = objective.window_seconds // 86_400
    now = selector("slo:sli_error:ratio_rate5m", chosen)
    whole = selector(f"slo:sli_error:ratio_rate{period}", chosen)
    burned = selector("slo:period_burn_rate:ratio", chosen)
    info = {
        **labels,
        "sloth_mode": "servoscope",
        "sloth_spec": "servoscope",
        "sloth_version": "servoscope",
        "sloth_objective": number(100 * objective.target_ratio),
    }
    return [
        _record("slo:objective:ratio", f"vector({number(objective.target_ratio)})", labels),
        _record("slo:error_budget:ratio", f"vector({budget})", labels),
        _record("slo:time_period:days", f"vector({days})", labels),
        _record(
            "slo:current_burn_rate:ratio", f"max without (sloth_window) ({now}) / {budget}", labels
        ),
        _record(
            "slo:period_burn_rate:ratio", f"max without (sloth_window) ({whole}) / {budget}", labels
        ),
        _record("slo:period_error_budget_remaining:ratio", f"1 - {burned}", labels),
        _record("sloth_slo_info", "vector(1)", info),
    ]


def slice_recordings(spec: Spec) -> list[Rule]:
    """Per model, version, request type and GPU model: for dashboards and for the page's text."""
    by = f"sum by (service, objective, {', '.join(SLICE_LABELS)})"
    select = {"service": spec.service}
    over_select = {**select, "factor": number(OVER_FACTOR)}
    rules: list[Rule] = []
    for window in ("5m", "1h"):
        all_events = f"rate({selector(_TOTAL, select)}[{window}])"
        good = f"rate({selector(_GOOD, select)}[{window}])"
        events = f"servoscope:slo_events_by_slice:rate{window}"
        chosen = selector(events, select)
        bad = f"{by} (\n  clamp_min({all_events} - ({good} or 0 * {all_events}), 0) >= 0\n)"
        over = f"{by} (rate({selector(_OVER, over_select)}[{window}]) >= 0)"
        rules += [
            _record(events, f"{by} ({all_events} >= 0)", {}),
            _record(
                f"servoscope:slo_error_by_slice:ratio_rate{window}", f"{bad}\n/\n({chosen} > 0)", {}
            ),
            _record(
                f"servoscope:slo_over_by_slice:ratio_rate{window}",
                f"({over} or 0 * {chosen})\n/\n({chosen} > 0)",
                {},
            ),
        ]
    return rules


def _error_ratio(objective: Objective, window: str) -> Rule:
    labels = {**series_labels(objective), "sloth_window": window}
    expr = _ratio(objective, "servoscope:slo_bad_events", window)
    return _record(f"slo:sli_error:ratio_rate{window}", expr, labels)


def _ratio(objective: Objective, numerator: str, window: str) -> str:
    chosen = {"sloth_id": objective.id}
    above = selector(f"{numerator}:rate{window}", chosen)
    below = selector(f"servoscope:slo_events:rate{window}", chosen)
    return f"{above}\n/\n({below} > 0)"


def _record(name: str, expr: str, labels: dict[str, str]) -> Rule:
    rule: Rule = {"record": name, "expr": expr}
    if labels:
        rule["labels"] = dict(labels)
    return rule

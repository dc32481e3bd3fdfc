"""Alert rules on engines and sidecars, the same for every spec. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servoscope.alerts.duration import format_duration, prometheus_duration
from servoscope.alerts.objective_alerts import alert
from servoscope.alerts.promql import quoted
from servoscope.exporters.catalog import metric

if TYPE_CHECKING:
    from servoscope.alerts.settings import RuleSettings

__all__ = ["all_sidecars_gone", "engine_gone", "engine_stalled", "sidecar_gone"]

Rule = dict[str, Any]

#: One engine as one sidecar sees it. `server` alone is not unique: 127.0.0.1:8000 on every host.
_ENGINE_LABELS = "(job, instance, engine, server)"
_BY = f"by {_ENGINE_LABELS}"
_ON = f"on {_ENGINE_LABELS}"
_ENGINE = "{{ $labels.engine }} at {{ $labels.server }}"
_DASHBOARD = "&var-server={{ $labels.server }}"


def engine_gone(settings: RuleSettings) -> Rule:
    """Page: the sidecar lives and its engine does not answer."""
    return alert(
        "ServoscopeEngineGone",
        f"max {_BY} ({metric('engine_up').full_name}) == 0",
        tier="page",
        pending_seconds=settings.pending_seconds,
        summary=f"{_ENGINE} does not answer",
        description=(
            f"{_ENGINE} has not answered its sidecar ({{{{ $labels.instance }}}}) for "
            f"{format_duration(settings.pending_seconds)} or more (servoscope_engine_up is "
            "{{ $value }}). Requests sent to it fail; those that were running are lost."
        ),
        settings=settings,
        dashboard_query=_DASHBOARD,
    )


def engine_stalled(settings: RuleSettings) -> Rule:
    """Page: there are requests and no token comes. /health may well answer 200 (fault 21)."""
    short = prometheus_duration(settings.stall_window_seconds)
    long = prometheus_duration(settings.long_stall_window_seconds)
    running, waiting = metric("running").full_name, metric("waiting").full_name
    tokens = metric("engine_generated_tokens_total").full_name
    scheduled = metric("scheduled_tokens_total").full_name
    steps = metric("scheduler_steps_total").full_name
    up, source_up = metric("engine_up").full_name, metric("source_up").full_name

    def busy(window: str) -> str:
        # Held through the whole window; what waits while nothing runs counts as well.
        return (
            f"(\n      sum {_BY} (min_over_time({running}[{window}]) >= 0) > 0\n"
            f"      or\n      sum {_BY} (min_over_time({waiting}[{window}]) >= 0) > 0\n    )"
        )

    def silent(window: str) -> str:
        # A counter younger than the window has not had the time to be silent for it.
        return (
            f"and {_ON}\n    sum {_BY} (increase({tokens}[{window}])) == 0\n"
            f"    and {_ON}\n    sum {_BY} ({tokens} offset {window} >= 0) >= 0"
        )

    # A long prompt is computed in chunks for minutes before its first token: tokens scheduled are
    # progress too, where somebody counts them, but not for ever. llama.cpp counts steps, and the
    # tokens of an answer only when it has ended.
    expr = (
        "(\n  (\n"
        f"    {busy(short)}\n    {silent(short)}\n"
        f"    unless {_ON}\n    sum {_BY} (increase({scheduled}[{short}])) > 0\n"
        f"    unless {_ON}\n    sum {_BY} (increase({steps}[{short}])) > 0\n"
        "  )\n  or\n  (\n"
        f"    {busy(long)}\n    {silent(long)}\n"
        "  )\n)\n"
        # Counters that stand still because nobody can read them prove nothing.
        f"unless {_ON} max {_BY} ({up}) == 0\n"
        f'unless {_ON} max {_BY} ({source_up}{{source="scrape"}}) == 0'
    )
    return alert(
        "ServoscopeEngineStalled",
        expr,
        tier="page",
        pending_seconds=settings.pending_seconds,
        summary=f"{_ENGINE} has {{{{ $value }}}} requests and generates no token",
        description=(
            f"{_ENGINE} answers, holds {{{{ $value }}}} requests and has generated no token for "
            f"{format_duration(settings.stall_window_seconds)} or more. Health checks do not see "
            "this."
        ),
        settings=settings,
        dashboard_query=_DASHBOARD,
    )


def sidecar_gone(settings: RuleSettings) -> Rule:
    """Ticket: one sidecar is not there to be scraped; what it watches is not watched."""
    return alert(
        "ServoscopeSidecarGone",
        f"up{{job=~{quoted(settings.sidecar_job)}}} == 0",
        tier="ticket",
        pending_seconds=settings.sidecar_pending_seconds,
        summary="Sidecar {{ $labels.instance }} cannot be scraped",
        description=(
            "Prometheus could not scrape sidecar {{ $labels.instance }} (job {{ $labels.job }}) "
            f"for {format_duration(settings.sidecar_pending_seconds)} or more. Its engine may be "
            "well or not: nobody is looking, and its requests are missing from every objective."
        ),
        settings=settings,
        dashboard_query="",
    )


def all_sidecars_gone(settings: RuleSettings) -> Rule:
    """Page: every sidecar of a job is gone, so no page can come from anywhere else."""
    return alert(
        "ServoscopeAllSidecarsGone",
        f"max by (job) (up{{job=~{quoted(settings.sidecar_job)}}}) == 0",
        tier="page",
        pending_seconds=settings.sidecar_pending_seconds,
        summary="No sidecar of job {{ $labels.job }} can be scraped: every other alert is blind",
        description=(
            "Prometheus could scrape none of "
            '{{ with printf "count(up{job=%q})" $labels.job | query }}'
            "{{ . | first | value }}{{ end }} sidecars of job {{ $labels.job }} for "
            f"{format_duration(settings.sidecar_pending_seconds)} or more. Either their hosts or "
            "the network are gone, engines included, or the sidecars alone; no objective is "
            "measured until one is back."
        ),
        settings=settings,
        dashboard_query="",
    )

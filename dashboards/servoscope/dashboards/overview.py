"""The dashboard "Servoscope overview": by request type, model version and GPU model."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models.dashboard import Dashboard, DashboardCursorSync, Panel
from grafana_foundation_sdk.models.table import Options as TableOptions

from servoscope.dashboards.engine_sections import engine_sections
from servoscope.dashboards.promql import Recorded
from servoscope.dashboards.request_sections import request_sections
from servoscope.dashboards.variables import template_variables

__all__ = ["UID", "overview"]

#: Links and runbooks name it: it never changes.
UID = "servoscope-overview"


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
    sections = request_sections(recorded) | engine_sections()
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

"""Template variables of a dashboard: the data source, and one filter a label."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from servoscope.dashboards.promql import VARIABLES, QueryError
from servoscope.exporters.catalog import metric

__all__ = ["DATASOURCE", "template_variables"]

#: Every panel reads the data source that the reader picked.
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

#: label → (title, metric whose series list its values). engine_up has series without any traffic.
_LISTED_BY: dict[str, tuple[str, str]] = {
    "model_name": ("Model", "engine_up"),
    "model_version": ("Model version", "engine_up"),
    "gpu_model": ("GPU model", "engine_up"),
    "request_type": ("Request type", "requests_total"),
    "server": ("Server", "engine_up"),
}


def template_variables() -> Sequence[Builder[VariableModel]]:
    """Data source first; each later variable offers only values that fit those before it."""
    data_source = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [data_source, *(_filter(i, label) for i, label in enumerate(VARIABLES))]


def _filter(position: int, label: str) -> Builder[VariableModel]:
    title, listed_by = _LISTED_BY[label]
    line = metric(listed_by)
    if label not in line.labels:
        raise QueryError(f"variable {label}: {listed_by} has no such label")
    earlier = [f'{v}=~"${v}"' for v in VARIABLES[:position] if v in line.labels]
    series = f"{line.full_name}{{{', '.join(earlier)}}}" if earlier else line.full_name
    return (
        build.QueryVariable(label)
        .label(title)
        .datasource(DATASOURCE)
        .query(f"label_values({series}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")  # also series without the label
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )

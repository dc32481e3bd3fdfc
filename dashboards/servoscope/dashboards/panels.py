"""How an answer looks: panel builders, one a kind. What is asked is in ``queries.py``.

A panel cannot be made without a title, a description and a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Panel,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from servoscope.dashboards.promql import Query
from servoscope.dashboards.variables import DATASOURCE

__all__ = ["GRID_COLUMNS", "Steps", "Text", "series", "slices", "stat_value", "timeline"]

GRID_COLUMNS = 24
_STAT_HEIGHT, _SERIES_HEIGHT, _TABLE_HEIGHT, _TIMELINE_HEIGHT = 4, 8, 9, 8


@dataclass(frozen=True, slots=True)
class Text:
    """What a reader needs to know: the title, what the number means, and Grafana's unit id."""

    title: str
    description: str
    unit: str

    def __post_init__(self) -> None:
        """Refuse an empty text: a number without its meaning is not shown."""
        for name in ("title", "description", "unit"):
            if not getattr(self, name).strip():
                raise ValueError(f"panel {self.title!r}: {name} is empty")


@dataclass(frozen=True, slots=True)
class Steps:
    """Colours from ``base`` upwards: (from this value on, colour)."""

    base: str
    above: tuple[tuple[float, str], ...] = ()

    def build(self) -> build.ThresholdsConfig:
        """As the SDK wants it."""
        steps = [Threshold(value=None, color=self.base)]
        steps += [Threshold(value=value, color=color) for value, color in self.above]
        return build.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


_PLAIN = Steps("blue")


def stat_value(
    text: Text, queries: Sequence[Query], *, width: int, steps: Steps = _PLAIN, decimals: int = 1
) -> Builder[Panel]:
    """One big number with its recent course behind it."""
    return (
        stat.Panel()
        .title(text.title)
        .description(text.description)
        .unit(text.unit)
        .decimals(decimals)
        .datasource(DATASOURCE)
        .targets(_targets(queries))
        .height(_STAT_HEIGHT)
        .span(width)
        .no_value("no data")
        .thresholds(steps.build())
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(build_common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )


def series(
    text: Text,
    queries: Sequence[Query],
    *,
    width: int,
    stacked: bool = False,
    lowest: float | None = 0.0,
    highest: float | None = None,
) -> Builder[Panel]:
    """Lines over time; ``stacked`` for parts of a whole. ``lowest=None`` lets the axis go below 0."""
    panel = (
        timeseries.Panel()
        .title(text.title)
        .description(text.description)
        .unit(text.unit)
        .datasource(DATASOURCE)
        .targets(_targets(queries))
        .height(_SERIES_HEIGHT)
        .span(width)
        .line_width(1)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(False)  # a gap is a fact: the engine or the scrape was away
        .legend(
            build_common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            build_common.VizTooltipOptions()
            .mode(TooltipDisplayMode.MULTI)
            .sort(SortOrder.DESCENDING)
        )
    )
    if lowest is not None:
        panel = panel.min(lowest)
    if highest is not None:
        panel = panel.max(highest)
    if stacked:
        panel = (
            panel.stacking(build_common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
            .fill_opacity(40)
            .gradient_mode(GraphGradientMode.NONE)
        )
    return panel


def timeline(
    text: Text, queries: Sequence[Query], *, width: int, states: Mapping[int, tuple[str, str]]
) -> Builder[Panel]:
    """Coloured bars of states over time. ``states``: number → (word, colour)."""
    mapping = ValueMap(
        options={
            str(code): ValueMappingResult(text=word, color=color, index=position)
            for position, (code, (word, color)) in enumerate(states.items())
        }
    )
    return (
        statetimeline.Panel()
        .title(text.title)
        .description(text.description)
        .unit(text.unit)
        .datasource(DATASOURCE)
        .targets(_targets(queries))
        .height(_TIMELINE_HEIGHT)
        .span(width)
        .mappings([mapping])
        .color_scheme(build.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .legend(
            build_common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
    )


def slices(
    text: Text,
    columns: Mapping[str, Query],
    *,
    keys: Mapping[str, str],
    units: Mapping[str, str],
) -> Builder[Panel]:
    """A table with one row a slice: instant queries merged on their labels.

    ``keys``: label → column title, in order; ``units``: column title → Grafana's unit id.
    """
    titles = list(columns)
    renamed = dict(keys) | {f"Value #{ascii_uppercase[i]}": t for i, t in enumerate(titles)}
    panel = (
        table.Panel()
        .title(text.title)
        .description(text.description)
        .unit(text.unit)
        .datasource(DATASOURCE)
        .targets(_targets(list(columns.values()), PromQueryFormat.TABLE))
        .height(_TABLE_HEIGHT)
        .span(GRID_COLUMNS)
        .filterable(True)
        .no_value("-")
        .transformations(
            [
                DataTransformerConfig(id_val="merge", options={}),
                DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {"Time": True},
                        "indexByName": {name: i for i, name in enumerate(renamed)},
                        "renameByName": renamed,
                    },
                ),
            ]
        )
        .sort_by([build_common.TableSortByFieldState().display_name(titles[0]).desc(True)])
    )
    for title, unit in units.items():
        if title not in columns:
            raise ValueError(f"panel {text.title!r}: no column {title!r} to give a unit")
        panel = panel.override_by_name(title, [DynamicConfigValue(id_val="unit", value=unit)])
    return panel


def _targets(
    queries: Sequence[Query], format_: PromQueryFormat = PromQueryFormat.TIME_SERIES
) -> list[Builder[Dataquery]]:
    if not 1 <= len(queries) <= len(ascii_uppercase):
        raise ValueError(f"a panel has 1 to {len(ascii_uppercase)} queries, not {len(queries)}")
    targets: list[Builder[Dataquery]] = []
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        target = (
            prometheus.Dataquery()
            .ref_id(ref_id)
            .datasource(DATASOURCE)
            .expr(query.expr)
            .legend_format(query.legend)
            .format(format_)
        )
        targets.append(target.instant() if query.instant else target.range())
    return targets

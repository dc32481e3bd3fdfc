"""What a dashboard asks, read back from its JSON: for checks, and to run it outside Grafana.

Pure: JSON and text in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DashboardError",
    "PanelQuery",
    "VariableQuery",
    "expand",
    "metric_names",
    "panel_queries",
    "variable_queries",
]

MAX_PANELS = 1000
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::(\w+))?\})")
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<selector>.+),\s*)?(?P<label>\w+)\)\Z")
#: Ours, and recorded series: both are the only names with a prefix or a colon that we write.
_METRIC = re.compile(r"(?<![\w:$])(servoscope_\w+|[a-zA-Z_]\w*(?::\w+)+)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_WINDOWS = ("__rate_interval", "__interval", "__range")


class DashboardError(ValueError):
    """A dashboard JSON, or a query in it, that cannot be read. The text names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """One target of one panel, as written: variables are not expanded."""

    panel_id: int
    panel_title: str
    ref_id: str
    expr: str
    instant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableQuery:
    """A filter variable: the label whose values it lists, and the selector it lists them from."""

    name: str
    label: str
    selector: str


def panel_queries(dashboard: Mapping[str, Any]) -> list[PanelQuery]:
    """Every Prometheus target of every panel, those in collapsed rows too, in order.

    Raises ``DashboardError`` naming the panel where a target has no expression.
    """
    found = []
    for panel in _panels(dashboard.get("panels", []), "panels"):
        title = str(panel.get("title", ""))
        for position, target in enumerate(panel.get("targets") or []):
            where = f"panel {panel.get('id')} {title!r} target {position}"
            expr = target.get("expr") if isinstance(target, Mapping) else None
            if not isinstance(expr, str) or not expr.strip():
                raise DashboardError(f"{where}: no expr")
            found.append(
                PanelQuery(
                    panel_id=int(panel.get("id", 0)),
                    panel_title=title,
                    ref_id=str(target.get("refId", "")),
                    expr=expr,
                    instant=bool(target.get("instant")),
                )
            )
    return found


def variable_queries(dashboard: Mapping[str, Any]) -> list[VariableQuery]:
    """Every query variable, in the order in which they depend on each other."""
    listed = (dashboard.get("templating") or {}).get("list", [])
    found = []
    for variable in listed:
        if variable.get("type") != "query":
            continue
        name, query = variable.get("name"), variable.get("query")
        match = _LABEL_VALUES.match(query) if isinstance(query, str) else None
        if match is None:
            raise DashboardError(
                f"variable {name!r}: {query!r} is not label_values(selector, label)"
            )
        found.append(
            VariableQuery(name=name, label=match["label"], selector=match["selector"] or "")
        )
    return found


def expand(
    query: str,
    variables: Mapping[str, str | Sequence[str]],
    rate_interval: str,
    range_interval: str = "1h",
) -> str:
    """The query as Grafana would send it.

    A text is put in as it stands; a sequence as a regular expression of its escaped values, as
    Grafana does for multi-value variables of a Prometheus data source. Raises ``DashboardError``
    for a variable that has no value.
    """
    windows = dict(zip(_WINDOWS, (rate_interval, rate_interval, range_interval), strict=True))

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in windows:
            return windows[name]
        if name not in variables:
            raise DashboardError(f"variable ${name} has no value in {query!r}")
        value = variables[name]
        return value if isinstance(value, str) else _one_of(value, name)

    return _VARIABLE.sub(replace, query)


def metric_names(query: str) -> set[str]:
    """Names of our series and of recorded series in a query, without what is inside quotes."""
    return set(_METRIC.findall(_QUOTED.sub('""', query)))


def _panels(panels: Any, where: str) -> Iterable[Mapping[str, Any]]:
    if not isinstance(panels, list) or len(panels) > MAX_PANELS:
        raise DashboardError(f"{where}: expected a list of at most {MAX_PANELS} panels")
    for position, panel in enumerate(panels):
        here = f"{where}[{position}]"
        if not isinstance(panel, Mapping):
            raise DashboardError(f"{here}: expected an object, found {type(panel).__name__}")
        if panel.get("type") == "row":
            yield from _panels(panel.get("panels") or [], f"{here}.panels")
        else:
            yield panel


def _one_of(values: Sequence[str], name: str) -> str:
    if not values:
        raise DashboardError(f"variable ${name} has an empty list of values")
    escaped = [_escape(value) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _escape(value: str) -> str:
    """A value as a regular expression, and that as the inside of a PromQL string."""
    pattern = re.sub(r"([\\^$.|?*+(){}\[\]])", r"\\\1", value)
    return pattern.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

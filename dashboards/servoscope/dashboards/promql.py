"""PromQL text made from the catalogue: a name, label or kind that does not fit fails at build.

Four rules hold by construction: counters are read through ``rate``/``increase``, histograms are
summed by ``le`` before any quantile, ratios divide sums (never averages of ratios), and every
selector carries the dashboard variables that its metric has labels for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from servoscope.exporters.catalog import Kind, Metric, metric

__all__ = [
    "NOT_SELECTED",
    "RATE_WINDOW",
    "VARIABLES",
    "Query",
    "QueryError",
    "Recorded",
    "aggregate",
    "increase",
    "quantile",
    "rate",
    "ratio",
    "selector",
    "zero_where_absent",
]

#: Grafana's own choice of a window: at least four scrapes, at least one step of the graph.
RATE_WINDOW = "$__rate_interval"
#: The whole time range that the reader picked.
RANGE_WINDOW = "$__range"
#: Template variables that filter; each is named after the label it matches.
VARIABLES: tuple[str, ...] = ("model_name", "model_version", "gpu_model", "request_type", "server")

Aggregation = Literal["sum", "min", "max"]


class QueryError(ValueError):
    """A query that the catalogue or the recording rules cannot answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One target of a panel: PromQL, the series' name, and whether only the last value counts."""

    expr: str
    legend: str
    instant: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The series that recording rules write: name → labels that every one of them carries."""

    labels: Mapping[str, Collection[str]]

    def select(self, name: str, **matchers: str) -> str:
        """A selector of a recorded series. ``QueryError`` for a rule or a label nobody writes."""
        if name not in self.labels:
            known = ", ".join(sorted(self.labels))
            raise QueryError(f"no recording rule writes {name!r}; known: {known}")
        for label in matchers:
            if label not in self.labels[name]:
                raise QueryError(f"{name}: no label {label!r} on the recorded series")
        return name + _braces([f'{label}="{value}"' for label, value in matchers.items()])


#: A request's type may rest on its output length, which is not known while it is in flight:
#: filtering by types of finished requests would hide what runs.
NOT_SELECTED = frozenset({("requests_in_flight", "request_type")})


def selector(name: str, suffix: str = "", **matchers: str) -> str:
    """``servoscope_<name>{…}`` with the variables that apply.

    ``matchers`` values are PromQL right-hand sides with their operator: ``outcome='=~"error|stuck"'``.
    """
    line = _known(name)
    _check_labels(line, matchers)
    parts = [
        f'{v}=~"${v}"' for v in VARIABLES if v in line.labels and (name, v) not in NOT_SELECTED
    ]
    parts += [f"{label}{condition}" for label, condition in matchers.items()]
    return line.full_name + suffix + _braces(parts)


def rate(name: str, by: tuple[str, ...] = (), **matchers: str) -> str:
    """Per-second increase of a counter, summed by labels."""
    return _over_counter("rate", name, RATE_WINDOW, by, matchers)


def increase(
    name: str, by: tuple[str, ...] = (), window: str = RATE_WINDOW, **matchers: str
) -> str:
    """Increase of a counter over ``window``, summed by labels."""
    return _over_counter("increase", name, window, by, matchers)


def aggregate(how: Aggregation, name: str, by: tuple[str, ...] = (), **matchers: str) -> str:
    """A gauge, aggregated by labels."""
    line = _known(name)
    if line.kind is not Kind.GAUGE:
        raise QueryError(f"{name} is a {line.kind}: only a gauge is read as it stands")
    _check_labels(line, by)
    return f"{how}{_by(by)}({selector(name, **matchers)})"


def quantile(
    q: float, name: str, by: tuple[str, ...] = (), window: str = RATE_WINDOW, **matchers: str
) -> str:
    """A quantile of a histogram: rates of buckets summed by ``le`` first."""
    if not 0 < q < 1:
        raise QueryError(f"{name}: quantile {q} is not between 0 and 1")
    line = _known(name)
    if line.kind is not Kind.HISTOGRAM:
        raise QueryError(f"{name} is a {line.kind}: a quantile needs a histogram")
    _check_labels(line, by)
    buckets = selector(name, "_bucket", **matchers)
    return f"histogram_quantile({q:g}, sum{_by(('le', *by))}(rate({buckets}[{window}])))"


def ratio(part: str, whole: str) -> str:
    """``part / whole``, without a value where ``whole`` is zero: no traffic is not 0 %, nor NaN."""
    return f"{part} / ({whole} > 0)"


def zero_where_absent(part: str, whole: str) -> str:
    """``part``, and 0 for each series of ``whole`` that has no ``part`` (no error so far)."""
    return f"({part} or 0 * {whole})"


def _over_counter(
    function: str, name: str, window: str, by: tuple[str, ...], matchers: Mapping[str, str]
) -> str:
    line = _known(name)
    if line.kind is not Kind.COUNTER:
        raise QueryError(f"{name} is a {line.kind}: {function} needs a counter")
    _check_labels(line, by)
    return f"sum{_by(by)}({function}({selector(name, **matchers)}[{window}]))"


def _known(name: str) -> Metric:
    try:
        line = metric(name)
    except KeyError:
        raise QueryError(f"{name!r} is not in the catalogue") from None
    if line.since is None:
        raise QueryError(f"{name!r} is planned: nothing publishes it yet")
    return line


def _check_labels(line: Metric, labels: Collection[str]) -> None:
    for label in labels:
        if label not in line.labels:
            raise QueryError(f"{line.name}: no label {label!r}; it has {', '.join(line.labels)}")


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


def _braces(parts: list[str]) -> str:
    return "{" + ", ".join(parts) + "}" if parts else ""

"""/metrics: families from the catalogue, lines rendered from cached prefixes.

Nothing can be published that the catalogue does not name. A series keeps the text left of its
value, made once; a histogram keeps one template with a slot for each number. Text format 0.0.4 and
OpenMetrics 1.0 share every sample line here and differ only in the headers and the last line.

Pure: no clock, no I/O. ``prometheus_client`` is the oracle for the output in tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from servoscope.exporters.catalog import CATALOG, Kind, Metric, metric
from servoscope.sidecar.measure.histogram import ClassicCounts, FineHistogram

__all__ = [
    "OPENMETRICS_CONTENT_TYPE",
    "TEXT_CONTENT_TYPE",
    "Family",
    "HistogramFamily",
    "HistogramSeries",
    "Registry",
    "Series",
]

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Labels = tuple[str, ...]  # values, in the order of the catalogue


def escape(value: str) -> str:
    """A label value as both formats want it: UTF-8, whatever an engine's JSON or argv held."""
    if not value.isascii():
        value = value.encode("utf-8", "backslashreplace").decode()  # lone surrogates, readably
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """A sample value or bucket edge as both formats want it."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if math.isnan(value):
        return "NaN"
    return repr(value)


def _pairs(names: Sequence[str], values: Labels) -> str:
    return ",".join(f'{n}="{escape(v)}"' for n, v in zip(names, values, strict=True))


class Series:
    """One counter or gauge: set or add to ``value``."""

    __slots__ = ("labels", "prefix", "value")

    def __init__(self, name: str, names: Sequence[str], labels: Labels) -> None:
        self.labels = labels
        pairs = _pairs(names, labels)
        self.prefix = f"{name}{{{pairs}}} " if pairs else f"{name} "
        self.value: float = 0


class HistogramSeries:
    """One histogram on the classic grid, with the fine one beside it to read quantiles from."""

    __slots__ = ("_template", "classic", "fine", "labels")

    def __init__(self, m: Metric, labels: Labels, edges: Sequence[float]) -> None:
        self.labels = labels
        self.classic = ClassicCounts(edges)
        self.fine = FineHistogram()
        self._template = histogram_template(m, labels, edges)

    def observe(self, value: float) -> None:
        """Count one value. Raises ValueError unless it is finite and not negative."""
        self.fine.observe(value)
        self.classic.observe(value)

    def lines(self) -> str:
        """All sample lines, or nothing while there was no observation."""
        classic = self.classic
        if not classic.count:
            return ""
        values = (*classic.cumulative(), number(classic.total), classic.count)
        return self._template % values


def histogram_template(m: Metric, labels: Labels, edges: Sequence[float]) -> str:
    """Sample lines of one histogram with ``%s`` for each number: buckets, sum, count."""
    pairs = _pairs(m.labels, labels).replace("%", "%%")
    lead = f"{pairs}," if pairs else ""
    lines = [f'{m.full_name}_bucket{{{lead}le="{number(e)}"}} %s\n' for e in (*edges, math.inf)]
    tail = f"{{{pairs}}}" if pairs else ""
    lines += [f"{m.full_name}_sum{tail} %s\n", f"{m.full_name}_count{tail} %s\n"]
    return "".join(lines)


class Family:
    """All series of one counter or gauge."""

    def __init__(self, m: Metric) -> None:
        self.metric = m
        self._series: dict[Labels, Series] = {}

    def __len__(self) -> int:
        return len(self._series)

    def series(self, labels: Labels) -> Series:
        """The series with these label values, made on first use."""
        found = self._series.get(labels)
        if found is None:
            found = Series(self.metric.full_name, self.metric.labels, labels)
            self._series[labels] = found
        return found

    def set(self, labels: Labels, value: float) -> None:
        """Set a gauge. A NaN is not a reading and leaves the series as it was."""
        if not math.isnan(value):
            self.series(labels).value = value

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Count up. A negative or NaN amount is ignored: counters never fall."""
        if amount >= 0:
            self.series(labels).value += amount

    def raise_to(self, labels: Labels, total: float) -> None:
        """Follow a total that only grows, kept elsewhere; a lower one is ignored."""
        series = self.series(labels)
        series.value = max(series.value, total)

    def get(self, labels: Labels) -> float | None:
        """The value of a series, or ``None`` when there is none."""
        found = self._series.get(labels)
        return None if found is None else found.value

    def values(self) -> Mapping[Labels, float]:
        """All series, for tests and for inspect."""
        return {labels: s.value for labels, s in self._series.items()}

    def remove(self, labels: Labels) -> None:
        """Forget a series; unknown ones are ignored."""
        self._series.pop(labels, None)

    def clear(self) -> None:
        """Forget all series."""
        self._series.clear()

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Make a gauge say exactly this: series that are not in ``values`` end."""
        for labels in [known for known in self._series if known not in values]:
            del self._series[labels]
        for labels, value in values.items():
            self.set(labels, value)

    def lines(self) -> Iterator[str]:
        """Sample lines."""
        for s in self._series.values():
            yield f"{s.prefix}{number(s.value)}\n"


class HistogramFamily:
    """All series of one histogram on the catalogue's grid, and texts of engines' own histograms."""

    def __init__(self, m: Metric) -> None:
        self.metric = m
        self._series: dict[Labels, HistogramSeries] = {}
        self._foreign: dict[Labels, str] = {}

    def __len__(self) -> int:
        return len(self._series) + len(self._foreign)

    def series(self, labels: Labels) -> HistogramSeries:
        """The series with these label values, made on first use."""
        found = self._series.get(labels)
        if found is None:
            found = HistogramSeries(self.metric, labels, self.metric.buckets)
            self._series[labels] = found
        return found

    def set_foreign(
        self, labels: Labels, buckets: Sequence[tuple[float, float]], total: float, count: float
    ) -> None:
        """Show an engine's own histogram: cumulative (edge, count), the last edge +Inf."""
        edges = [edge for edge, _ in buckets if edge != math.inf]
        values = [number(n) for edge, n in buckets if edge != math.inf]
        values += [number(count), number(total), number(count)]
        self._foreign[labels] = histogram_template(self.metric, labels, edges) % tuple(values)

    def remove(self, labels: Labels) -> None:
        """Forget a series; unknown ones are ignored."""
        self._series.pop(labels, None)
        self._foreign.pop(labels, None)

    def clear(self) -> None:
        """Forget all series."""
        self._series.clear()
        self._foreign.clear()

    def lines(self) -> Iterator[str]:
        """Sample lines."""
        for s in self._series.values():
            yield s.lines()
        yield from self._foreign.values()


class Registry:
    """Every family of the catalogue, made on first use."""

    def __init__(self) -> None:
        self._scalars: dict[str, Family] = {}
        self._histograms: dict[str, HistogramFamily] = {}

    def family(self, name: str) -> Family:
        """A counter or gauge. Raises KeyError for a name that the catalogue does not have."""
        found = self._scalars.get(name)
        if found is None:
            m = metric(name)
            if m.kind is Kind.HISTOGRAM:
                raise KeyError(f"{name} is a histogram")
            found = self._scalars[name] = Family(m)
        return found

    def histogram(self, name: str) -> HistogramFamily:
        """A histogram. Raises KeyError for a name that the catalogue does not have."""
        found = self._histograms.get(name)
        if found is None:
            m = metric(name)
            if m.kind is not Kind.HISTOGRAM:
                raise KeyError(f"{name} is a {m.kind}")
            found = self._histograms[name] = HistogramFamily(m)
        return found

    def render(self, *, openmetrics: bool = False) -> str:
        """The exposition, in the catalogue's order, without OpenMetrics' last line."""
        out: list[str] = []
        for m in CATALOG:
            family = self._scalars.get(m.name) or self._histograms.get(m.name)
            if family is None:
                continue
            samples = "".join(family.lines())
            if samples:
                out.extend(_header(m, openmetrics=openmetrics))
                out.append(samples)
        return "".join(out)


def _header(m: Metric, *, openmetrics: bool) -> Iterable[str]:
    name = m.full_name
    text = m.help.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        text = text.replace('"', '\\"')
        if m.kind is Kind.COUNTER:
            name = name.removesuffix("_total")
    return (f"# HELP {name} {text}\n", f"# TYPE {name} {m.kind.value}\n")

"""What one text says, as plain values: the form of ``servoscope parse --json``. Pure.

Several series of one signal (ranks, models, tiers, reasons) become one ``value`` by the signal's
own rule, and all of them stand in ``series``: nothing is lost, and nothing has to be added up by
the reader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from servoscope.exporters.catalog import Kind, metric
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.exposition import Exposition, TextParser
from servoscope.exporters.mapping import Mapper
from servoscope.exporters.records import EngineSample, HistogramReading, Reading
from servoscope.exporters.table import Table

__all__ = ["engines_in", "report", "report_of"]


def report_of(
    text: str | bytes, *, engine: str | None = None, version: str | None = None
) -> dict[str, Any]:
    """Everything that can be said of one exposition.

    Args:
        text: the whole text.
        engine: whose it is; None: the engine of which it holds most series.
        version: the engine's. No engine writes it into its metrics; without it what is absent by
            design cannot be told from what is missing.

    Returns:
        The form of ``report``, with ``engine`` None and no signals when no engine was recognised,
        and ``recognised``: engine → number of its series.
    """
    exposition = TextParser().parse(text)
    found = engines_in(exposition)
    kind = engine or next(iter(found), None)
    if kind is None:
        sample = EngineSample(
            engine="", version=version, readings=(), refused=tuple(exposition.refused)
        )
        return {**report(sample), **_bounds(sample, exposition), "engine": None, "recognised": {}}
    table = parser_for(kind, version).table
    sample = Mapper(table, version).sample(exposition)
    return {**report(sample, table), **_bounds(sample, exposition), "recognised": found}


def engines_in(exposition: Exposition) -> dict[str, int]:
    """Engines whose prefix a series has, and how many, the most first. By prefix, not by guess."""
    tables = [parser_for(engine, None).table for engine in ENGINES]
    names = Counter(series.name for series in exposition.samples)
    counts = {
        table.engine: sum(n for name, n in names.items() if name.startswith(table.prefixes))
        for table in tables
    }
    found = sorted((x for x in counts.items() if x[1]), key=lambda x: -x[1])
    return dict(found)


def report(sample: EngineSample, table: Table | None = None) -> dict[str, Any]:
    """A sample as ``{engine, version, signals, absent, absent_by_design, unknown, refused}``.

    A signal is ``{value, unit, labels, kind, rule, series}``: ``labels`` are those that all its
    series share, ``rule`` says how ``value`` was made of them (sum, max). Of a histogram, ``value``
    is the mean in ``unit`` (None while it is empty), beside ``count`` and ``sum``.
    """
    by_design = table.absent_in(sample.version) if table else ()
    by_name: dict[str, list[Reading | HistogramReading]] = {}
    items: list[Reading | HistogramReading] = [*sample.readings, *sample.histograms]
    for item in items:
        by_name.setdefault(item.name, []).append(item)
    return {
        "engine": sample.engine,
        "version": sample.version,
        "signals": {name: _signal(name, by_name[name]) for name in sorted(by_name)},
        "absent": list(sample.absent),
        "absent_by_design": [s for s in sample.absent if s in by_design],
        "unknown": list(sample.unknown),
        "refused": [{"name": r.name, "value": r.value, "why": r.why} for r in sample.refused],
    }


def _bounds(sample: EngineSample, exposition: Exposition) -> dict[str, Any]:
    """How much was read; the lists above are bounded, these counts are not."""
    by_the_table = len(sample.refused) - len(exposition.refused)
    return {
        "read_series": len(exposition.samples),
        "refused_total": exposition.refused_total + by_the_table,
        "truncated": exposition.truncated,
    }


def _signal(name: str, items: Sequence[Reading | HistogramReading]) -> dict[str, Any]:
    ours = metric(name)
    ratio = ours.unit == "ratio"
    shared = set(items[0].labels).intersection(*(item.labels for item in items[1:]))
    whole: dict[str, Any] = {
        "value": None,
        "unit": ours.unit,
        "labels": dict(sorted(shared)),
        "kind": ours.kind.value,
        "rule": "max" if ratio else "sum",
    }
    if ours.kind is Kind.HISTOGRAM:
        histograms = [item for item in items if isinstance(item, HistogramReading)]
        count = math.fsum(h.count for h in histograms)
        total = math.fsum(h.sum for h in histograms)
        whole |= {"value": total / count if count else None, "count": count, "sum": total}
        whole["series"] = [_histogram(h) for h in histograms]
        return whole
    readings = [item for item in items if isinstance(item, Reading)]
    values = [reading.value for reading in readings]
    whole["value"] = max(values) if ratio else math.fsum(values)
    whole["series"] = [{"value": r.value, "labels": dict(r.labels)} for r in readings]
    return whole


def _histogram(h: HistogramReading) -> Mapping[str, Any]:
    return {
        "value": h.sum / h.count if h.count else None,
        "labels": dict(h.labels),
        "count": h.count,
        "sum": h.sum,
        "buckets": list(_edges(h.buckets)),
    }


def _edges(buckets: Iterable[tuple[float, float]]) -> Iterable[tuple[float | str, float]]:
    """JSON has no infinity: the last edge is written as Prometheus writes it."""
    for edge, count in buckets:
        yield ("+Inf" if edge == math.inf else edge), count

"""From an engine's own metric names to ours: exposition and table → :class:`EngineSample`.

Pure: what a series is gets decided once and kept (the plan), so that later texts of the same
engine cost little; besides the plan the only state is which series was seen to change last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from servoscope.exporters.assembly import Assembly, Group, Part, Place
from servoscope.exporters.catalog import Kind
from servoscope.exporters.exposition import Exposition, Series, TextParser
from servoscope.exporters.records import EngineSample, Reading
from servoscope.exporters.table import Labels, Line, Table

__all__ = ["MAX_UNKNOWN", "PROCESS_LABEL", "Mapper", "TableParser"]

MAX_UNKNOWN = 500
#: prometheus_client puts it on gauges when an engine has several front-end processes.
PROCESS_LABEL = "pid"

_PARTS = {"_bucket": Part.BUCKET, "_sum": Part.SUM, "_count": Part.COUNT}


class Mapper:
    """Reads the expositions of ONE engine with one table, one after the other."""

    def __init__(self, table: Table, version: str | None) -> None:
        self.table = table
        self.version = version
        self._lines: dict[str, list[Line]] = {}
        for line in table.lines:
            self._lines.setdefault(line.name, []).append(line)
        self._plan: dict[Series, tuple[Place, ...]] = {}
        self._groups: dict[tuple[str, Labels], Group] = {}
        self._unknown: dict[Series, dict[str, str]] = {}  # what is unknown → how it is reported
        self._changes: dict[Series, tuple[float, int]] = {}
        self._texts = 0

    def sample(self, exposition: Exposition) -> EngineSample:
        """Readings, histograms, and what was absent, unknown or refused."""
        self._texts += 1
        assembly = Assembly(exposition.refused)
        plan = self._plan
        for series, value in exposition.samples.items():
            places = plan.get(series)
            if places is None:
                places = plan[series] = self._place(series, exposition.types)
            for place in places:
                assembly.put(place, series, value)
        unknown: dict[str, str] = {}  # a label nobody knows once, not for each metric that has it
        for series, texts in self._unknown.items():
            if series in exposition.samples:
                for key, text in texts.items():
                    unknown.setdefault(key, text)
        readings = _possible_hits(assembly.readings(self._latest), assembly)
        histograms = assembly.histograms()
        self._forget(exposition.samples)
        return EngineSample(
            engine=self.table.engine,
            version=self.version,
            readings=readings,
            histograms=histograms,
            absent=tuple(s for s in self.table.core if s not in assembly.seen),
            unknown=tuple(unknown.values())[:MAX_UNKNOWN],
            refused=tuple(assembly.refused),
        )

    def _place(self, series: Series, types: Mapping[str, str]) -> tuple[Place, ...]:
        """Decide what a series is; remembers names and labels that no line knows."""
        short = self._without_prefix(series.name)
        if short is None:
            return ()
        base, part = self._split(short)
        lines = self._lines.get(base, [])
        if part == Part.CREATED or (not lines and base in self.table.not_used):
            return ()
        family = _family(series.name, types)
        fitting = [x for x in lines if _can_be(x.kind, part, short)]
        if not fitting:
            self._unknown[series] = {family: family}
            return ()
        labels = dict(series.labels)
        if any(labels.get(name, whole) != whole for line in fitting for name, whole in line.whole):
            return ()  # a part of a total that stands in the text as well
        chosen = [x for x in fitting if all(labels.get(n, "") in v for n, v in x.where)]
        if not chosen:
            self._note_value(series, base, family, fitting)
        return tuple(self._place_on(line, part, series, family) for line in chosen)

    def _note_value(self, series: Series, base: str, family: str, lines: list[Line]) -> None:
        """A known name with a value of a known label that no line claims: reported, not guessed."""
        known = self.table.not_used_series
        told = {name for line in lines for name, _ in line.where}
        pairs = [pair for pair in series.labels if pair[0] in told]
        if not any((base, *pair) in known for pair in pairs):
            text = family + "{" + ",".join(f'{n}="{v[:64]}"' for n, v in pairs) + "}"
            self._unknown[series] = {text: text}

    def _place_on(self, line: Line, part: str, series: Series, family: str) -> Place:
        table = self.table
        renamed = dict((*table.renamed_labels, *line.renamed))
        known = {name for name, _ in (*line.where, *line.whole)}
        known |= table.ignored_labels | table.mirror_labels
        labels = dict(line.labels)
        edge, odd = math.nan, []
        for name, value in series.labels:
            if name == "le" and part == Part.BUCKET:
                edge = _edge(value) * line.factor
            elif name == table.rank_label:
                labels["rank"] = value
            elif name in table.kept_labels:
                labels[name] = value
            elif name in renamed:
                labels[renamed[name]] = value
            elif name not in known:
                odd.append(name)
        if odd:
            self._unknown[series] = {f"{{{name}}}": f"{family}{{{name}}}" for name in odd}
        kept = tuple(sorted(pair for pair in labels.items() if pair[0] in table.kept_labels))
        return Place(
            line=line,
            group=self._group(line.signal, tuple(sorted(labels.items()))),
            contest=self._group(line.signal, kept),
            part=part,
            edge=edge,
            owner=None if part == Part.VALUE else self._owner(series),
            mirror=self._mirror(line, series),
            by_process=line.kind is Kind.GAUGE and PROCESS_LABEL in odd,
        )

    def _mirror(self, line: Line, series: Series) -> Group:
        """What a series says, whichever process of those with the same requests says it, and
        whichever prefix its name has: releases in between write a metric under both."""
        left_out = self.table.mirror_labels | {"le"}
        if line.kind is Kind.GAUGE:
            left_out |= {PROCESS_LABEL}
        return self._group(line.name, tuple(p for p in series.labels if p[0] not in left_out))

    def _owner(self, series: Series) -> Group:
        name = series.name.rpartition("_")[0]
        return self._group(name, tuple(pair for pair in series.labels if pair[0] != "le"))

    def _group(self, name: str, labels: Labels) -> Group:
        return self._groups.setdefault((name, labels), Group(name, labels))

    def _without_prefix(self, name: str) -> str | None:
        for prefix in self.table.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return None

    def _split(self, short: str) -> tuple[str, str]:
        """The table's name of a series, and which part of that metric it is."""
        for suffix, part in _PARTS.items():
            if short.endswith(suffix):
                base = short.removesuffix(suffix).removesuffix("_total")
                if base in self._lines or base in self.table.not_used:
                    return base, part
        base = short.removesuffix("_created").removesuffix("_total")
        if short.endswith("_created") and (base in self._lines or base in self.table.not_used):
            return base, Part.CREATED
        return short.removesuffix("_total"), Part.VALUE

    def _latest(self, values: Iterable[tuple[Series, float]]) -> float:
        """Of one gauge written by several processes: the one that changed last (fault 18).

        A process that gets no more updates keeps its last value for ever, so neither the sum nor
        the largest is right. Among those that changed at the same text: the largest.
        """
        best = (-1, -math.inf)
        for series, value in values:
            before = self._changes.get(series)
            changed = self._texts if before is None or before[0] != value else before[1]
            self._changes[series] = (value, changed)
            best = max(best, (changed, value))
        return best[1]

    def _forget(self, samples: Mapping[Series, float]) -> None:
        """Drop the plan of series that are gone, once they outweigh those that are there."""
        if len(self._plan) <= 2 * len(samples) + 1_024:
            return
        self._plan = {s: p for s, p in self._plan.items() if s in samples}
        self._unknown = {s: n for s, n in self._unknown.items() if s in samples}
        self._changes = {s: c for s, c in self._changes.items() if s in samples}
        places = [place for places in self._plan.values() for place in places]
        groups = [g for p in places for g in (p.group, p.contest, p.owner, p.mirror) if g]
        self._groups = {(g.signal, g.labels): g for g in groups}


class TableParser:
    """Reads the texts of ONE server, one after the other: every engine's parser is one of these.

    Ranks stay apart (label ``rank``): sum counters and ``running``/``waiting`` over them with
    ``EngineSample.total``, take the largest ``kv_usage_ratio`` with ``EngineSample.peak``.
    """

    table: ClassVar[Table]

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self._text = TextParser()
        self._mapper = Mapper(self.table, version)

    def parse(self, text: str | bytes) -> EngineSample:
        """Read one whole text. Never raises for what is in it."""
        return self._mapper.sample(self._text.parse(text))


def _possible_hits(readings: tuple[Reading, ...], assembly: Assembly) -> tuple[Reading, ...]:
    """Refuse hits where a rank found more tokens in one tier than it looked up at all.

    Preemption and retries inflated the hits of some versions (known fault 12), and a hit rate
    above 1 is no hit rate. Tiers are judged one by one: versions differ in whether the lookups
    of preempted requests are counted in each.
    """
    queries = {r.labels: r.value for r in readings if r.name == "kv_query_tokens_total"}
    kept: list[Reading] = []
    for reading in readings:
        if reading.name == "kv_hit_tokens_total":
            most = queries.get(tuple(pair for pair in reading.labels if pair[0] != "kv_tier"))
            if most is not None and reading.value > most:
                why = f"more hits than the {most:g} queries"
                assembly.refuse(reading.name, repr(reading.value), why)
                continue
        kept.append(reading)
    return tuple(kept)


def _can_be(kind: Kind, part: str, short: str) -> bool:
    """Whether a series of this form can be a metric of this kind.

    A gauge is never written with ``_total``: that is the count of something, under a like name.
    """
    if kind is Kind.HISTOGRAM or part != Part.VALUE:
        return kind is Kind.HISTOGRAM and part != Part.VALUE
    return kind is Kind.COUNTER or not short.endswith("_total")


def _edge(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # refused with its histogram


def _family(name: str, types: Mapping[str, str]) -> str:
    """The metric that ``name`` is a series of, by the declared types: one name, not four."""
    for suffix in _PARTS:
        base = name.removesuffix(suffix)
        if base != name and types.get(base) in {"histogram", "summary"}:
            return base
    base = name.removesuffix("_created")
    if base != name:
        return f"{base}_total" if f"{base}_total" in types else base
    return name

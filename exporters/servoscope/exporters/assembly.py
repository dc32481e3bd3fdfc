"""Values that passed their checks → readings and histograms of one sample. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from servoscope.exporters.catalog import Kind, metric
from servoscope.exporters.exposition import Series
from servoscope.exporters.records import HistogramReading, Reading, Refused
from servoscope.exporters.table import Labels, Line, Ranks

__all__ = [
    "MAX_HISTOGRAMS",
    "MAX_READINGS",
    "MAX_REFUSED",
    "MAX_VALUE",
    "Assembly",
    "Group",
    "Part",
    "Place",
]

MAX_READINGS = 5_000  # of one signal: 64 ranks of 10 models with 5 reasons stay below
MAX_HISTOGRAMS = 1_000  # of one signal: so no flood crowds others out
MAX_REFUSED = 300
MAX_VALUE = 1e18  # 30,000 years of a million tokens a second; sums of these stay finite
_RATIO_SLACK = 1e-6  # 1.0000000001 is rounding, 1.01 is a wrong number

Latest = Callable[[Iterable[tuple[Series, float]]], float]


class Part:
    """Which part of a metric a series is."""

    VALUE = "value"
    BUCKET = "bucket"
    SUM = "sum"
    COUNT = "count"
    CREATED = "created"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One reading to be: a signal with its labels. Compared by identity."""

    signal: str
    labels: Labels


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the value of one series goes.

    Of all places of one ``contest`` (a signal of one model) only those whose line has the lowest
    preference count. ``owner`` is the histogram the series belongs to (the engine's name and
    labels without ``le``): several owners in one group are added up. Places that share a
    ``mirror`` are one thing told more than once (by several processes, or under two spellings of
    its name): the largest counts, once; with ``by_process`` the one that changed last.
    """

    line: Line
    group: Group
    part: str = Part.VALUE
    edge: float = math.nan  # upper, in our unit
    owner: Group | None = None
    contest: Group | None = None  # None: its group alone
    mirror: Group | None = None
    by_process: bool = False

    @property
    def contestant(self) -> Group:
        """What it competes in."""
        return self.contest or self.group


_Entry = tuple[Place, Series, float]


@dataclass(slots=True)
class _Histogram:
    place: Place
    name: str
    buckets: list[tuple[float, float]] = field(default_factory=list)
    sum: float | None = None
    count: float | None = None


class Assembly:
    """One text on its way to a sample."""

    def __init__(self, refused: Iterable[Refused]) -> None:
        self.refused: list[Refused] = list(refused)
        self.seen: set[str] = set()  # signals with a series, believed or not
        self._values: dict[Group, list[_Entry]] = {}
        self._histograms: dict[Group, dict[Group, _Histogram]] = {}

    def put(self, place: Place, series: Series, value: float) -> None:
        """Take one value, or refuse it by name."""
        line = place.line
        self.seen.add(line.signal)
        if place.owner is not None:
            self._put_part(place, place.owner, value)
            return
        value *= line.factor
        why = why_not(line, value)
        if why:
            self.refuse(series.name, repr(value), why)
        else:
            self._values.setdefault(place.group, []).append((place, series, value))

    def _put_part(self, place: Place, owner: Group, value: float) -> None:
        histograms = self._histograms.setdefault(place.group, {})
        histogram = histograms.get(owner)
        if histogram is None:
            histogram = histograms[owner] = _Histogram(place, owner.signal)
        if place.part == Part.BUCKET:
            histogram.buckets.append((place.edge, value))
        elif place.part == Part.SUM:
            histogram.sum = value * place.line.factor
        else:
            histogram.count = value

    def refuse(self, name: str, value: str, why: str) -> None:
        """Note a value that was read and not believed; the list is bounded."""
        if len(self.refused) < MAX_REFUSED:
            self.refused.append(Refused(name, value[:64], why))

    def readings(self, latest: Latest) -> tuple[Reading, ...]:
        """One reading a group. ``latest`` picks among series that only differ by process."""
        first = _preferred(place for values in self._values.values() for place, _, _ in values)
        out: list[Reading] = []
        counts: Counter[str] = Counter()
        for group, values in self._values.items():
            if not self._room(counts, group.signal, MAX_READINGS):
                continue
            kept = [v for v in values if v[0].line.preference == first[v[0].contestant]]
            if not kept:
                continue
            needed = kept[0][0].line.addends
            if needed > 1 and len({place.line.name for place, _, _ in kept}) < needed:
                self.seen.discard(group.signal)
                continue
            value = kept[0][2] if len(kept) == 1 else _together(kept, latest)
            out.append(Reading(group.signal, value, group.labels))
        return tuple(out)

    def histograms(self) -> tuple[HistogramReading, ...]:
        """One histogram a group, with the engine's own edges."""
        first = _preferred(h.place for owned in self._histograms.values() for h in owned.values())
        out: list[HistogramReading] = []
        counts: Counter[str] = Counter()
        for group, by_owner in self._histograms.items():
            if not self._room(counts, group.signal, MAX_HISTOGRAMS):
                continue
            kept = [
                h for h in by_owner.values() if h.place.line.preference == first[h.place.contestant]
            ]
            total: HistogramReading | None = None
            for histogram in _told_once(kept):
                total = self._added(group, total, histogram)
            if total is not None:
                out.append(total)
        return tuple(out)

    def _room(self, counts: Counter[str], signal: str, most: int) -> bool:
        """Whether one more of a signal is taken; the first that is not is refused by name."""
        counts[signal] += 1
        if counts[signal] == most + 1:
            self.refuse("text", signal, f"more than {most} series of it: the rest was left out")
        return counts[signal] <= most

    def _added(
        self, group: Group, total: HistogramReading | None, histogram: _Histogram
    ) -> HistogramReading | None:
        why = _why_no_histogram(histogram)
        buckets = tuple(histogram.buckets)
        if why or histogram.sum is None or histogram.count is None:
            self.refuse(histogram.name, repr(buckets[-1:]), why)
            return total
        if total is None:
            return HistogramReading(
                group.signal, buckets, histogram.sum, histogram.count, group.labels
            )
        if [edge for edge, _ in total.buckets] != [edge for edge, _ in buckets]:
            self.refuse(histogram.name, "", "histograms with unlike edges cannot be added")
            return total
        return HistogramReading(
            group.signal,
            tuple((e, a + b) for (e, a), (_, b) in zip(total.buckets, buckets, strict=True)),
            total.sum + histogram.sum,
            total.count + histogram.count,
            group.labels,
        )


def why_not(line: Line, value: float) -> str:
    """Why a value cannot be what ``line`` says it is; empty when it can."""
    if not math.isfinite(value):
        return "not a finite number"
    if value > MAX_VALUE:
        return f"more than {MAX_VALUE:g}"
    if value < 0:
        return "negative counter" if line.kind is Kind.COUNTER else "negative"
    if value > 1 + _RATIO_SLACK and metric(line.signal).unit == "ratio":
        return "ratio above 1"
    return ""


def _preferred(places: Iterable[Place]) -> dict[Group, int]:
    """The lowest preference that occurs in each contest."""
    first: dict[Group, int] = {}
    for place in places:
        preference = place.line.preference
        contest = place.contestant
        if preference < first.get(contest, preference + 1):
            first[contest] = preference
    return first


def _together(kept: list[_Entry], latest: Latest) -> float:
    line = kept[0][0].line
    told: dict[Group | Place, list[_Entry]] = {}
    for entry in kept:
        told.setdefault(entry[0].mirror or entry[0], []).append(entry)
    values = [_one_of(entries, latest) for entries in told.values()]
    return math.fsum(values) if line.ranks is Ranks.SUM else max(values)


def _one_of(entries: list[_Entry], latest: Latest) -> float:
    """Of one thing that is told more than once, the value to believe."""
    if len(entries) > 1 and any(place.by_process for place, _, _ in entries):
        return latest((series, value) for _, series, value in entries)
    return max(value for _, _, value in entries)


def _told_once(histograms: list[_Histogram]) -> list[_Histogram]:
    """Of histograms that tell of the same requests more than once, the fullest.

    Those that cannot be read stay, to be refused by name.
    """
    out: list[_Histogram] = []
    mirrored: dict[Group, _Histogram] = {}
    for histogram in histograms:
        mirror = histogram.place.mirror
        if mirror is None or _why_no_histogram(histogram):
            out.append(histogram)
            continue
        known = mirrored.setdefault(mirror, histogram)
        if (histogram.count or 0.0) > (known.count or 0.0):
            mirrored[mirror] = histogram
    return [*out, *mirrored.values()]


def _why_no_histogram(histogram: _Histogram) -> str:
    """Why it cannot be read; empty when it can. Puts its buckets in order."""
    buckets = histogram.buckets
    buckets.sort()
    total, count = histogram.sum, histogram.count
    if total is None or count is None or not buckets:
        return "histogram without its sum, count or buckets"
    counts = [number for _, number in buckets]
    edges_finite = not any(math.isnan(edge) for edge, _ in buckets)
    if not (edges_finite and all(map(math.isfinite, (total, count, *counts)))):
        return "not a finite number"
    checks = (
        (min(total, count, *counts) < 0, "negative counter"),
        (max(total, count, *counts) > MAX_VALUE, f"more than {MAX_VALUE:g}"),
        (buckets[-1][0] != math.inf, "no +Inf bucket"),
        (any(a > b for a, b in pairwise(counts)), "bucket counts fall with the edge"),
        (counts[-1] != count, "the +Inf bucket is not the count"),
    )
    return next((why for wrong, why in checks if wrong), "")

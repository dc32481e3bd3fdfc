"""What an engine says of itself (an EngineSample) into the catalogue's engine families.

Counters are followed across restarts (``totals``) and summed over ranks; additive gauges are
summed, ratios take the fullest rank. The engine's own request histograms and request counts are
published only while no source sees requests, marked source="scrape". Pure.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servoscope.exporters.catalog import CATALOG, FLEET, Kind
from servoscope.exporters.records import EngineSample, HistogramReading, Outcome, Reading, Source
from servoscope.sidecar.measure.labels import OTHER
from servoscope.sidecar.measure.totals import Totals

if TYPE_CHECKING:
    from servoscope.sidecar.measure.pipeline import Identity
    from servoscope.sidecar.publish.families import Registry

__all__ = ["EngineMetrics", "Progress"]

_ENGINE = {m.name: m for m in CATALOG if m.part == "engine"}
_LOAD = ("running", "waiting", "kv_usage_ratio")
_REQUESTS = "engine_requests_total"
_PROGRESS = ("engine_generated_tokens_total", "engine_prompt_tokens_total", _REQUESTS)
_OUTCOMES = {
    "stop": Outcome.COMPLETED,
    "length": Outcome.LENGTH,
    "abort": Outcome.CANCELLED,
    "error": Outcome.ERROR,
}
_MAX_SERIES = 1_000  # of one family: an engine with more models than this is not believed

Labels = tuple[str, ...]
CounterKey = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Progress:
    """What one sample showed: is there work, did the engine start again, what must be refused."""

    busy: bool
    reset: bool
    fell: tuple[str, ...]
    finished: float  # requests the engine counted since the last sample


class EngineMetrics:
    """Feeds samples of one server into a registry."""

    def __init__(self, registry: Registry, identity: Identity) -> None:
        self._registry = registry
        self._counters: Totals[CounterKey] = Totals()
        self._histograms: Totals[tuple[CounterKey, float | str]] = Totals()
        self.identity = identity
        self.publish_requests = False  # True while the scrape is the only source of requests
        self._told_by_loads: frozenset[str] = frozenset()  # gauges that come from somewhere fresher

    def observe(self, sample: EngineSample, epoch: Hashable = None) -> Progress:
        """Take one sample. ``epoch``: which life of the engine it is from, if that is known."""
        counters: dict[CounterKey, float] = {}
        gauges: dict[str, list[Reading]] = {}
        for reading in sample.readings:
            m = _ENGINE.get(reading.name)
            if m is None:
                continue
            if m.kind is Kind.COUNTER:
                counters[reading.name, reading.labels] = reading.value
            else:
                gauges.setdefault(reading.name, []).append(reading)
        step = self._counters.observe(counters, epoch)
        self._publish_counters()
        for name, readings in gauges.items():
            if name not in self._told_by_loads:
                self._publish_gauge(name, readings)
        self._count_requests(step.deltas)
        self._publish_histograms(sample.histograms, epoch)
        working = (sample.total("running") or 0) + (sample.total("waiting") or 0) > 0
        moved = any(delta > 0 and key[0] in _PROGRESS for key, delta in step.deltas.items())
        finished = sum(d for key, d in step.deltas.items() if key[0] == _REQUESTS)
        fell = tuple(dict.fromkeys(name for name, _ in step.fell))
        return Progress(working or moved, step.reset, fell, finished)

    def observe_loads(self, sample: EngineSample) -> None:
        """Gauges that are fresher than those of /metrics: they stand until ``loads_gone``."""
        gauges: dict[str, list[Reading]] = {}
        for reading in sample.readings:
            if reading.name in _LOAD:
                gauges.setdefault(reading.name, []).append(reading)
        for name, readings in gauges.items():
            self._publish_gauge(name, readings)
        self._told_by_loads = frozenset(gauges)

    def loads_gone(self) -> None:
        """They are not told apart any more: they end, until /metrics tells them."""
        for name in self._told_by_loads:
            self._registry.family(name).clear()
        self._told_by_loads = frozenset()

    def gone(self) -> None:
        """The engine's /metrics do not answer: its gauges end; counters stay as they are."""
        for name in _LOAD:
            if name not in self._told_by_loads:
                self._registry.family(name).clear()

    def stop_requests(self) -> None:
        """Another source sees requests now: the engine's own histograms end."""
        self.publish_requests = False
        for m in _ENGINE.values():
            if m.name.startswith("reported_"):
                self._registry.histogram(m.name).clear()

    def forget_identity(self) -> None:
        """Another model, version or GPU: what was counted under the old labels ends."""
        self._counters, self._histograms = Totals(), Totals()
        for m in _ENGINE.values():
            if m.labels[: len(FLEET)] != FLEET:
                continue
            if m.kind is Kind.HISTOGRAM:
                self._registry.histogram(m.name).clear()
            else:
                self._registry.family(m.name).clear()

    def _labels(self, name: str, labels: tuple[tuple[str, str], ...]) -> Labels:
        given = dict(labels)
        identity = self.identity
        values = {
            "engine": identity.engine,
            "server": identity.server,
            "model_name": given.get("model_name") or identity.model_name,
            "model_version": identity.model_version,
            "gpu_model": identity.gpu_model,
            "source": Source.SCRAPE.value,
        }
        return tuple(values.get(n) or given.get(n, "") for n in _ENGINE[name].labels)

    def _publish_counters(self) -> None:
        sums: dict[str, dict[Labels, float]] = {}
        for (name, labels), total in self._counters.totals().items():
            family = sums.setdefault(name, {})
            key = self._labels(name, labels)
            family[key] = family.get(key, 0.0) + total
        for name, values in sums.items():
            family_ = self._registry.family(name)
            for key, total in list(values.items())[:_MAX_SERIES]:
                family_.series(key).value = total

    def _publish_gauge(self, name: str, readings: list[Reading]) -> None:
        ratio = _ENGINE[name].unit == "ratio"
        values: dict[Labels, float] = {}
        for reading in readings[:_MAX_SERIES]:
            key = self._labels(name, reading.labels)
            if key not in values:
                values[key] = reading.value
            else:
                known = values[key]
                values[key] = max(known, reading.value) if ratio else known + reading.value
        self._registry.family(name).replace(values)

    def _count_requests(self, deltas: Mapping[CounterKey, float]) -> None:
        if not self.publish_requests:
            return
        identity = self.identity
        family = self._registry.family("requests_total")
        for (name, labels), delta in deltas.items():
            if name != _REQUESTS or delta <= 0:
                continue
            given = dict(labels)
            outcome = _OUTCOMES.get(given.get("finish_reason", ""), Outcome.UNKNOWN)
            fleet = {f: getattr(identity, f) for f in FLEET}
            fleet["model_name"] = given.get("model_name") or identity.model_name
            key = (
                fleet["engine"], fleet["server"], fleet["model_name"], fleet["model_version"],
                "unknown", fleet["gpu_model"], "unknown", Source.SCRAPE.value,
                outcome.value, "unknown",
            )  # fmt: skip
            if len(family) >= _MAX_SERIES and family.get(key) is None:
                key = (*key[:2], OTHER, *key[3:])
            family.add(key, delta)

    def _publish_histograms(
        self, histograms: tuple[HistogramReading, ...], epoch: Hashable
    ) -> None:
        flat: dict[tuple[CounterKey, float | str], float] = {}
        for h in histograms:
            if h.name in _ENGINE and h.name.startswith("reported_"):
                at = (h.name, h.labels)
                flat.update({(at, edge): n for edge, n in h.buckets})
                flat[at, "sum"], flat[at, "count"] = h.sum, h.count
        self._histograms.observe(flat, epoch)
        if self.publish_requests:
            self._show_histograms()

    def _show_histograms(self) -> None:
        grouped: dict[tuple[str, Labels], dict[float | str, float]] = {}
        for ((name, labels), part), total in self._histograms.totals().items():
            group = grouped.setdefault((name, self._labels(name, labels)), {})
            group[part] = group.get(part, 0.0) + total
        for (name, key), parts in grouped.items():
            edges = sorted(p for p in parts if isinstance(p, float) and p != math.inf)
            count = parts["count"]
            buckets = [(e, parts[e]) for e in edges]
            self._registry.histogram(name).set_foreign(key, buckets, parts["sum"], count)

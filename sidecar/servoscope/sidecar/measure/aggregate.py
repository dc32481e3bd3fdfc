"""Finished requests into histograms, counters and SLI counters, under caps.

Which requests enter what:

* ``requests_total`` counts every record; prompt, output and cached tokens whatever the outcome.
* TTFT, queue, prefill, decode, TPOT and inter-token gaps count where the milestone was reached,
  whatever the outcome: a request that its client left after ten tokens did wait for its first.
* ``e2e_seconds`` counts requests that were served in full (completed, length). A rejection after
  one millisecond is no fast answer; it is bad in the SLI counters.
* SLI counters are decided here, once a request, by ``alerts.verdict``: no bucket edge is involved.

Full histograms have no tenant label; tenants appear on the SLI counters only. Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from servoscope.alerts.spec import OVER_FACTOR
from servoscope.alerts.verdict import verdict
from servoscope.exporters.catalog import SLICE
from servoscope.exporters.records import Outcome, RequestRecord
from servoscope.sidecar.measure.labels import OTHER, LabelTable

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.sidecar.config import LabelsConfig
    from servoscope.sidecar.publish.families import HistogramSeries, Registry, Series

__all__ = ["Aggregate"]

_FACTOR = f"{OVER_FACTOR:g}"  # the label of slo_over_total

#: Histograms whose name is the record's field, counted wherever the field has a value.
_MILESTONES = (
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
)
_SERVED = frozenset({Outcome.COMPLETED, Outcome.LENGTH})
_CAPPED = {"model_name": 2, "model_version": 3, "request_type": 4}  # label -> place in SLICE
_STREAMING = {True: "true", False: "false", None: "unknown"}

SliceLabels = tuple[str, ...]


class _Slice:
    """All series of one label set of full histograms."""

    __slots__ = ("goodput", "goodput_tokens", "histograms", "labels", "requests", "tokens")

    def __init__(self, registry: Registry, labels: SliceLabels) -> None:
        self.labels = labels
        self.histograms: dict[str, HistogramSeries] = {}
        self.requests: dict[tuple[str, str], Series] = {}
        self.goodput = registry.family("goodput_requests_total").series(labels)
        self.goodput_tokens = registry.family("goodput_tokens_total").series(labels)
        self.tokens = registry.family("throughput_tokens_total").series(labels)


class _SloSeries:
    """The counters of one objective for one slice and tenant."""

    __slots__ = ("censored", "good", "over", "total")

    def __init__(self, registry: Registry, objective: Objective, labels: tuple[str, ...]) -> None:
        head = (objective.service, objective.name)
        self.total = registry.family("slo_total").series((*head, *labels))
        self.good = registry.family("slo_good_total").series((*head, *labels))
        self.censored = registry.family("slo_censored_total").series((*head, *labels))
        self.over: Series | None = None
        if objective.threshold_seconds is not None:
            over = registry.family("slo_over_total")
            self.over = over.series((*head, _FACTOR, *labels))


class Aggregate:
    """Takes records that are complete (identity and type filled, impossible values refused)."""

    def __init__(
        self, registry: Registry, objectives: Sequence[Objective], labels: LabelsConfig
    ) -> None:
        self._registry = registry
        self._objectives = tuple(objectives)
        self._config = labels
        self._slices: dict[SliceLabels, _Slice] = {}
        self._slo: dict[tuple[int, tuple[str, ...]], _SloSeries] = {}
        self._folded = {"slice": 0, "slo_series": 0}
        self._labels = LabelTable(
            {
                "model_name": labels.max_models,
                "model_version": labels.max_versions,
                "request_type": labels.max_request_types,
                "tenant": labels.max_tenants,
            },
            self._forget,
        )
        for objective in self._objectives:
            head = (objective.service, objective.name)
            registry.family("slo_target_ratio").set(head, objective.target_ratio)
            if objective.threshold_seconds is not None:
                registry.family("slo_threshold_seconds").set(head, objective.threshold_seconds)

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        admit = self._labels.admit
        labels = (
            record.engine,
            record.server,
            admit("model_name", record.model_name),
            admit("model_version", record.model_version),
            admit("request_type", record.request_type),
            record.gpu_model,
            _STREAMING[record.streaming],
            record.source.value,
        )
        found = self._slice(labels)
        self._count(found, record)
        self._judge(found, record, admit("tenant", record.tenant))

    def shown(self, label: str, value: str) -> str:
        """The value a label would have on a request that ends now; lets nothing in."""
        return self._labels.shown(label, value)

    def folded(self) -> dict[str, int]:
        """Observations folded into ``other`` so far, by label (or by table)."""
        return {**self._labels.folded(), **self._folded}

    def label_sizes(self) -> dict[str, int]:
        """Values kept now, by label (and by table)."""
        sizes = self._labels.sizes()
        return {**sizes, "slice": len(self._slices), "slo_series": len(self._slo)}

    def _slice(self, labels: SliceLabels) -> _Slice:
        found = self._slices.get(labels)
        if found is not None:
            return found
        if len(self._slices) >= self._config.max_slices:
            self._folded["slice"] += 1
            labels = (*labels[:2], OTHER, OTHER, OTHER, *labels[5:])
            if labels in self._slices:
                return self._slices[labels]
        made = self._slices[labels] = _Slice(self._registry, labels)
        return made

    def _count(self, found: _Slice, record: RequestRecord) -> None:
        key = (record.outcome.value, record.phase.value)
        counter = found.requests.get(key)
        if counter is None:
            family = self._registry.family("requests_total")
            counter = found.requests[key] = family.series((*found.labels, *key))
        counter.value += 1
        for name in _MILESTONES:
            value = getattr(record, name)
            if value is not None:
                self._histogram(found, name).observe(value)
        if record.e2e_seconds is not None and record.outcome in _SERVED:
            self._histogram(found, "e2e_seconds").observe(record.e2e_seconds)
        if record.inter_token_seconds:
            gaps = self._histogram(found, "inter_token_latency_seconds")
            for gap in record.inter_token_seconds:
                gaps.observe(gap)
        found.tokens.value += record.output_tokens or 0

    def _histogram(self, found: _Slice, name: str) -> HistogramSeries:
        series = found.histograms.get(name)
        if series is None:
            series = self._registry.histogram(name).series(found.labels)
            found.histograms[name] = series
        return series

    def _judge(self, found: _Slice, record: RequestRecord, tenant: str) -> None:
        labels = (*found.labels, tenant)
        counted = missed = False
        for i, objective in enumerate(self._objectives):
            judged = verdict(objective, record)
            if not (judged.counted or judged.censored):
                continue
            series = self._slo_series(i, objective, labels)
            if judged.censored:
                series.censored.value += 1
                continue
            counted = True
            series.total.value += 1
            if judged.good:
                series.good.value += 1
            else:
                missed = True
            if judged.over and series.over is not None:
                series.over.value += 1
        if counted and not missed:  # as alerts.verdict.meets_all, without judging twice
            found.goodput.value += 1
            found.goodput_tokens.value += record.output_tokens or 0

    def _slo_series(self, i: int, objective: Objective, labels: tuple[str, ...]) -> _SloSeries:
        found = self._slo.get((i, labels))
        if found is not None:
            return found
        if len(self._slo) >= self._config.max_slo_series and labels[-1] != OTHER:
            self._folded["slo_series"] += 1
            return self._slo_series(i, objective, (*labels[:-1], OTHER))
        made = self._slo[i, labels] = _SloSeries(self._registry, objective, labels)
        return made

    def _forget(self, label: str, value: str) -> None:
        """A value lost its place: its series end (their counts are not moved to ``other``)."""
        place = len(SLICE) if label == "tenant" else _CAPPED[label]
        for i, labels in [key for key in self._slo if key[1][place] == value]:
            del self._slo[i, labels]
            head = (self._objectives[i].service, self._objectives[i].name)
            for name in ("slo_total", "slo_good_total", "slo_censored_total"):
                self._registry.family(name).remove((*head, *labels))
            self._registry.family("slo_over_total").remove((*head, _FACTOR, *labels))
        if label == "tenant":
            return
        for labels in [key for key in self._slices if key[place] == value]:
            self._drop_slice(self._slices.pop(labels))

    def _drop_slice(self, gone: _Slice) -> None:
        for name in gone.histograms:
            self._registry.histogram(name).remove(gone.labels)
        for key in gone.requests:
            self._registry.family("requests_total").remove((*gone.labels, *key))
        for name in ("goodput_requests_total", "goodput_tokens_total", "throughput_tokens_total"):
            self._registry.family(name).remove(gone.labels)

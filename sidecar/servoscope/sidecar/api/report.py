"""What a sidecar says when it is asked: /metrics, inspect, readiness, the state of its sources.

Reads the parts, changes none; bringing the families of ``SelfMetrics`` up to date is the one thing
it does before it renders.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.sidecar.api import inspection
from servoscope.sidecar.publish.host_metrics import HostMetrics, process_rows
from servoscope.sidecar.publish.self_metrics import SelfMetrics

if TYPE_CHECKING:
    from servoscope.sidecar.attach.watch import EngineWatch
    from servoscope.sidecar.control.knobs import KnobControl
    from servoscope.sidecar.measure.aggregate import Aggregate
    from servoscope.sidecar.measure.classify import Classifier
    from servoscope.sidecar.measure.pipeline import Pipeline
    from servoscope.sidecar.publish.families import Registry
    from servoscope.sidecar.publish.outlet import Outlet
    from servoscope.sidecar.sources.load_poll import LoadPoll
    from servoscope.sidecar.sources.scrape_loop import ScrapeLoop
    from servoscope.sidecar.sources.selection import Selection

__all__ = ["Report"]


class Report:
    """Over the parts of one sidecar. ``tap_asked``: the tap is not only tried but wanted."""

    def __init__(
        self,
        *,
        registry: Registry,
        watch: EngineWatch,
        scrape: ScrapeLoop,
        loads: LoadPoll | None = None,
        selection: Selection,
        pipeline: Pipeline,
        aggregate: Aggregate,
        classifier: Classifier,
        control: KnobControl,
        host_metrics: HostMetrics,
        outlet: Outlet,
        tap_asked: bool,
        refused_hosts: Callable[[], int],
        steady: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._watch = watch
        self._scrape = scrape
        self._loads = loads
        self._selection = selection
        self._pipeline = pipeline
        self._aggregate = aggregate
        self._classifier = classifier
        self._control = control
        self._policy = outlet.policy
        self._host_metrics = host_metrics
        self._pusher, self._spool = outlet.pusher, outlet.spool
        self._tap_asked = tap_asked
        self._refused_hosts = refused_hosts
        self._steady = steady
        self._own = SelfMetrics(registry, watch.target.engine, watch.target.server)

    def render(self, openmetrics: bool) -> str:
        """/metrics as of now, without this process's own part."""
        self._refresh()
        return self._registry.render(openmetrics=openmetrics)

    async def inspect(self) -> dict[str, Any]:
        """What ``servoscope inspect`` shows."""
        target = self._watch.target
        chosen = self._selection.in_force
        in_force = chosen.source if chosen else Source.SCRAPE
        knobs = await self._control.knobs()
        return inspection.payload(
            target,
            processes=await asyncio.to_thread(process_rows, target),
            gpus=self._host_metrics.gpus,
            sources=self.statuses(),
            knobs=knobs,
            in_force=in_force if self._selection.decided else None,
            knobs_why=self._control.why,
            policy=self._policy.view.as_json(),
        )

    def not_ready(self) -> str | None:
        """Why the numbers are not there yet, in words."""
        if not self._selection.decided:
            return "looking for a source of requests"
        if self._scrape.state.up is None:
            return "the engine was not read yet"
        return None

    def statuses(self) -> list[SourceStatus]:
        """Every source, best first; one that is not in use says why."""
        now = self._steady()
        found: list[SourceStatus] = []
        known = {c.source.source: c for c in self._selection.candidates}
        for source in self._listed():
            candidate = known.get(source)
            if candidate is None:
                found.append(SourceStatus(source=source, detail=self._why_not(source)))
                continue
            status = candidate.source.status(now)
            if source is Source.TAP and candidate.source is not self._selection.in_force:
                status = self._tap_at_rest(status, candidate.missing())
            found.append(status)
        loads = [self._loads.status(now)] if self._loads is not None else []
        return [*found, self._scrape.status(now), *loads]

    def _listed(self) -> tuple[Source, ...]:
        """Sources of requests that this kind of engine could have, best first."""
        if self._watch.target.engine == "sglang":
            return (Source.FILE, Source.TAP, Source.RELAY, Source.OTLP)
        return (Source.PLUGIN, Source.TAP, Source.RELAY)

    def _tap_at_rest(self, status: SourceStatus, missing: str | None) -> SourceStatus:
        """A tap that does not run: a fault only if it was asked for and cannot be had."""
        return dataclasses.replace(
            status,
            state=SourceState.FAILED if missing and self._tap_asked else SourceState.OFF,
            detail=missing or "possible; a better source is in force",
        )

    def _why_not(self, source: Source) -> str:
        if source is Source.PLUGIN:
            return f"there is no plug-in for {self._watch.target.engine}"
        if source is Source.TAP:
            return "off in the settings (sidecar.tap)"
        if source is Source.FILE:
            return "off in the settings (sidecar.request_file)"
        return f"not configured (sidecar.{source.value})"

    def _refresh(self) -> None:
        own, control, scrape = self._own, self._control, self._scrape
        own.sources(self.statuses())
        chosen = self._selection.in_force
        own.in_flight(
            chosen.open_requests() if chosen else (),
            self._pipeline.identity,
            self._classifier,
            self._aggregate.shown,
        )
        self._refresh_losses()
        own.counters("engine_restarts_total", {(): self._watch.restarts})
        sides = {("ours",): float(self._pipeline.taken)}
        if scrape.counts_requests:
            sides["engine",] = scrape.finished
        own.counters("reconcile_requests_total", sides)
        own.gauges("lease_held", {(): float(control.held)})
        own.counters("knob_changes_total", control.results)
        if scrape.sample is not None:
            own.gauges("unknown_engine_metrics", {(): float(len(scrape.sample.unknown))})
        if self._pusher is not None:
            pushed = {(result,): n for result, n in self._pusher.results.items()}
            own.counters("pushed_records_total", pushed)
            own.gauges("push_queue_records", {(): float(len(self._pusher))})
        if self._spool is not None:
            kept = {(result,): n for result, n in self._spool.results.items()}
            own.counters("spool_records_total", kept)
            own.counters("spool_damaged_lines_total", {(): self._spool.spool.damaged_lines})
            own.gauges("spool_bytes", {(): float(self._spool.spool.size)})
            own.gauges("spool_up", {(): float(self._spool.spool.ready)})
        self._refresh_policy()
        self._refresh_engine()

    def _refresh_policy(self) -> None:
        own, view = self._own, self._policy.view
        own.counters("policy_errors_total", {(why,): n for why, n in self._policy.errors.items()})
        if view.state is not SourceState.OFF:
            own.gauges("policy_up", {(): float(view.state is SourceState.OK)})
        if (policy := view.policy) is not None:
            own.gauges("policy_control_mode", {(policy.control_mode,): 1.0})
            own.gauges("policy_drift_freeze", {(): float(policy.drift_freeze)})
            own.gauges("policy_slo_mismatch", {(): float(bool(view.slo_mismatch))})
            own.gauges(
                "policy_last_success_timestamp_seconds", {(): view.last_success_unix_seconds or 0.0}
            )

    def _refresh_losses(self) -> None:
        own, scrape = self._own, self._scrape
        errors = {(Source.SCRAPE.value, why): n for why, n in scrape.state.errors.items()}
        if self._loads is not None:
            errors |= {(Source.LOADS.value, why): n for why, n in self._loads.errors.items()}
        own.counters("source_errors_total", errors)
        own.counters("source_dropped_total", self._drops())
        refused: Counter[tuple[str, ...]] = Counter(self._pipeline.refused)
        refused.update({(Source.SCRAPE.value, name): n for name, n in scrape.refused.items()})
        if self._loads is not None:
            refused.update({(Source.LOADS.value, n): k for n, k in self._loads.refused.items()})
        own.counters("refused_values_total", refused)
        folded = self._aggregate.folded()
        own.counters("labels_folded_total", {(label,): n for label, n in folded.items()})
        own.counters("probe_claims_total", {(): self._pipeline.probe_claims})
        own.counters("refused_hosts_total", {(): self._refused_hosts()})
        sizes = self._aggregate.label_sizes()
        own.gauges("label_values", {(label,): float(n) for label, n in sizes.items()})

    def _refresh_engine(self) -> None:
        target, family = self._watch.target, self._registry.family
        fleet = dataclasses.astuple(self._pipeline.identity)
        alive = self._watch.alive and self._scrape.state.up is not False
        family("engine_up").replace({fleet: float(alive)})
        family("engine_info").replace({(*fleet, target.version or "unknown"): 1.0})
        if target.start_unix_seconds is not None:
            key = (target.engine, target.server)
            family("engine_start_time_seconds").replace({key: target.start_unix_seconds})

    def _drops(self) -> dict[tuple[str, ...], int]:
        drops: dict[tuple[str, ...], int] = {
            (c.source.source.value, reason): n
            for c in self._selection.candidates
            for reason, n in c.source.drops().items()
        }
        for source, n in self._pipeline.failed.items():
            drops[source, "not_countable"] = n
        return {**drops, **self._selection.drops}

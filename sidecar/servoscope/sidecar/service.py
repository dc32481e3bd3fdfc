"""One sidecar: attach to an engine, see its requests, publish, push, steer; until cancelled.

Only wiring lives here. Every loop is a task of its own; a source, the collector or the engine that
fails is a metric, not an end. What ends the sidecar: cancellation, SIGTERM, or a fault of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from servoscope.exporters.paths import run_dir, state_dir
from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.exporters.vllm.knobs import find_knob_sockets
from servoscope.sidecar import inspection, server, token
from servoscope.sidecar.aggregate import Aggregate
from servoscope.sidecar.attach import AttachError, Target, attach
from servoscope.sidecar.audit import AuditLog
from servoscope.sidecar.classify import Classifier
from servoscope.sidecar.control import KnobControl
from servoscope.sidecar.control_api import ControlApi
from servoscope.sidecar.engine_metrics import EngineMetrics
from servoscope.sidecar.host_metrics import HostMetrics, process_rows
from servoscope.sidecar.knob_metrics import KnobMetrics
from servoscope.sidecar.pipeline import Identity, Pipeline
from servoscope.sidecar.plugin_source import PluginSource
from servoscope.sidecar.publish import Registry
from servoscope.sidecar.push import Pusher, http_post
from servoscope.sidecar.relay.source import RelaySource
from servoscope.sidecar.scrape_loop import ScrapeLoop
from servoscope.sidecar.selection import Candidate, Selection
from servoscope.sidecar.self_metrics import SelfMetrics
from servoscope.sidecar.tap.source import TapSource, tap_missing
from servoscope.sidecar.watch import EngineWatch

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.sidecar.config import SidecarConfig

__all__ = ["Sidecar", "run_sidecar"]

log = logging.getLogger(__name__)

_END_SECONDS = 3.0


async def run_sidecar(
    target_url: str, config: SidecarConfig, objectives: Sequence[Objective]
) -> None:
    """Attach to ``target_url`` and serve until cancelled or SIGTERM.

    Raises AttachError when there is nothing to attach to, OSError when no port is free,
    TokenError or PermissionError when the token or the runtime directory cannot be used.
    """
    config.validate()
    target = await attach(target_url, engine=config.engine, model_version=config.model_version)
    async with aiohttp.ClientSession(trust_env=False) as session:
        await Sidecar(target, config, objectives, session).run()


class Sidecar:
    """The parts of one sidecar, wired."""

    def __init__(
        self,
        target: Target,
        config: SidecarConfig,
        objectives: Sequence[Objective],
        session: aiohttp.ClientSession,
    ) -> None:
        self.config = config
        self.clock = time.time
        self.registry = Registry()
        identity = _identity(target)
        self.classifier = Classifier(
            config.types,
            long_prompt_tokens=config.long_prompt_tokens,
            long_output_tokens=config.long_output_tokens,
            warmup_seconds=config.warmup_seconds,
        )
        self.classifier.engine_start = target.start_unix_seconds
        self.pusher = _pusher(config, session, target.server)
        self.aggregate = Aggregate(self.registry, objectives, config.labels)
        self.pipeline = Pipeline(
            self.aggregate,
            self.classifier,
            identity,
            clock=self.clock,
            push=self.pusher.offer if self.pusher is not None else None,
        )
        self.watch = EngineWatch(
            target, self._attach_again, self._restarted,
            interval_seconds=config.watch_interval_seconds,
        )  # fmt: skip
        self.engine_metrics = EngineMetrics(self.registry, identity)
        self.scrape = ScrapeLoop(
            session, config, target, self.engine_metrics,
            on_reset=self.watch.reset_seen, after=self._read_rest, clock=self.clock,
        )  # fmt: skip
        self.host_metrics = HostMetrics(self.registry)
        self.knob_metrics = KnobMetrics(self.registry)
        self.self_metrics = SelfMetrics(self.registry, target.engine, target.server)
        self.control = KnobControl(
            config.control,
            AuditLog(state_dir() / "audit.jsonl", config.control.max_audit_bytes),
            target.server,
            lambda: find_knob_sockets(self.target.run_dirs, self.target.pids),
            engine=target.engine,
            clock=self.clock,
        )
        self.plugin = PluginSource(
            lambda: (self.target.run_dirs, list(self.target.pids)),
            alive=lambda: self.watch.alive,
            clock=self.clock,
            on_connect=self._plugin_connected,
        )
        self.selection = Selection(
            self._candidates(target),
            self.pipeline.take,
            clock=self.clock,
            on_switch=self._switched,
            scraped_until=lambda: self.scrape.counted_until,
        )
        self.port = 0

    @property
    def target(self) -> Target:
        """The engine as it was found last."""
        return self.watch.target

    async def run(self) -> None:
        """Serve until cancelled or SIGTERM; then give the knobs back and send what is queued."""
        token_path = state_dir() / "token"
        api = ControlApi(self.control, token.load_token(token_path))
        app = server.create_app(self.render, self.inspect, self.not_ready, api)
        listener = server.bind(self.config.host, self.config.port, self.config.port_attempts)
        self.port = listener.getsockname()[1]
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(server.serving(app, listener))
            stack.push_async_callback(self._end)
            place = server.registered(
                run_dir(), self.target.server, self.port, self.config.host, token_path
            )
            stack.enter_context(place)
            log.info(
                "attached to %s %s at %s; metrics at http://%s:%d/metrics",
                self.target.engine, self.target.version, self.target.url,
                self.config.host, self.port,
            )  # fmt: skip
            await self._run_tasks()

    def render(self, openmetrics: bool) -> str:
        """/metrics as of now, without this process's own part."""
        self._refresh()
        return self.registry.render(openmetrics=openmetrics)

    async def inspect(self) -> dict[str, Any]:
        """What ``servoscope inspect`` shows."""
        knobs = await self.control.knobs()
        chosen = self.selection.in_force
        in_force = chosen.source if chosen else Source.SCRAPE
        return inspection.payload(
            self.target,
            processes=await asyncio.to_thread(process_rows, self.target),
            gpus=self.host_metrics.gpus,
            sources=self.statuses(),
            knobs=knobs,
            in_force=in_force if self.selection.decided else None,
            knobs_why=self.control.why,
        )

    def not_ready(self) -> str | None:
        """Why the numbers are not there yet, in words."""
        if not self.selection.decided:
            return "looking for a source of requests"
        if self.scrape.state.up is None:
            return "the engine was not read yet"
        return None

    def statuses(self) -> list[SourceStatus]:
        """Every source, best first; one that is not in use says why."""
        now = self.clock()
        found: list[SourceStatus] = []
        known = {c.source.source: c for c in self.selection.candidates}
        for source in (Source.PLUGIN, Source.TAP, Source.RELAY):
            candidate = known.get(source)
            if candidate is None:
                found.append(SourceStatus(source=source, detail=self._why_not(source)))
                continue
            status = candidate.source.status(now)
            if source is Source.TAP and candidate.source is not self.selection.in_force:
                status = self._tap_at_rest(status, candidate.missing())
            found.append(status)
        return [*found, self.scrape.status(now)]

    def _tap_at_rest(self, status: SourceStatus, missing: str | None) -> SourceStatus:
        """A tap that does not run: a fault only if it was asked for and cannot be had."""
        asked = self.config.tap == "on"
        return dataclasses.replace(
            status,
            state=SourceState.FAILED if missing and asked else SourceState.OFF,
            detail=missing or "possible; a better source is in force",
        )

    async def _run_tasks(self) -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, stopping.set)
        jobs = [
            self.selection.run(),
            self.scrape.run(),
            self.watch.run(),
            self.control.run(),
        ]
        if self.pusher is not None:
            jobs.append(self.pusher.run())
        tasks = [asyncio.ensure_future(job) for job in jobs]
        stop = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # a fault of ours: end loudly
        finally:
            for task in (stop, *tasks):
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                    loop.remove_signal_handler(number)

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.control.aclose()
                if self.pusher is not None:
                    await self.pusher.flush()

    def _refresh(self) -> None:
        now = self.clock()
        own = self.self_metrics
        own.sources(self.statuses())
        chosen = self.selection.in_force
        own.in_flight(
            chosen.open_requests() if chosen else (), self.pipeline.identity, self.classifier
        )
        own.counters("source_errors_total", {
            (Source.SCRAPE.value, reason): n for reason, n in self.scrape.state.errors.items()
        })  # fmt: skip
        own.counters("source_dropped_total", self._drops())
        refused: Counter[tuple[str, ...]] = Counter(self.pipeline.refused)
        refused.update({(Source.SCRAPE.value, n): c for n, c in self.scrape.refused.items()})
        own.counters("refused_values_total", refused)
        folded = self.aggregate.folded()
        own.counters("labels_folded_total", {(label,): n for label, n in folded.items()})
        sizes = self.aggregate.label_sizes()
        own.gauges("label_values", {(label,): float(n) for label, n in sizes.items()})
        own.counters("engine_restarts_total", {(): self.watch.restarts})
        sides = {("ours",): float(self.pipeline.taken)}
        if self.scrape.counts_requests:
            sides["engine",] = self.scrape.finished
        own.counters("reconcile_requests_total", sides)
        own.gauges("lease_held", {(): float(self.control.held)})
        own.counters("knob_changes_total", self.control.results)
        if self.scrape.sample is not None:
            own.gauges("unknown_engine_metrics", {(): float(len(self.scrape.sample.unknown))})
        if self.pusher is not None:
            pushed = {(result,): n for result, n in self.pusher.results.items()}
            own.counters("pushed_records_total", pushed)
            own.gauges("push_queue_records", {(): float(len(self.pusher))})
        self._refresh_engine(now)

    def _refresh_engine(self, _now: float) -> None:
        target, family = self.target, self.registry.family
        fleet = dataclasses.astuple(self.pipeline.identity)
        alive = self.watch.alive and self.scrape.state.up is not False
        family("engine_up").replace({fleet: float(alive)})
        family("engine_info").replace({(*fleet, target.version or "unknown"): 1.0})
        if target.start_unix_seconds is not None:
            key = (target.engine, target.server)
            family("engine_start_time_seconds").replace({key: target.start_unix_seconds})

    def _drops(self) -> dict[tuple[str, ...], int]:
        drops: dict[tuple[str, ...], int] = {
            (c.source.source.value, reason): n
            for c in self.selection.candidates
            for reason, n in c.source.drops().items()
        }
        for source, n in self.pipeline.failed.items():
            drops[source, "not_countable"] = n
        return {**drops, **self.selection.drops}

    async def _read_rest(self) -> None:
        """In the rhythm of the scrape: processes, GPUs, knobs."""
        await self.host_metrics.read(self.target)
        states = await self.control.states()
        self.knob_metrics.publish(states, self.pipeline.identity, self.target.identity)

    def _candidates(self, target: Target) -> list[Candidate]:
        config = self.config
        found: list[Candidate] = []
        if target.engine == "vllm":
            found.append(
                Candidate(
                    self.plugin,
                    self.plugin.missing,
                    always=True,
                    settled=lambda: self.plugin.settled,
                )
            )
        if config.tap != "off":
            tap = TapSource(target.host, target.port, interface=config.tap_interface)
            found.append(Candidate(tap, lambda: tap_missing(target.host, target.port)))
        if config.relay is not None:
            host, port = config.relay_address()
            relay = RelaySource(host, port, target.host, target.port, server=target.server)
            found.append(Candidate(relay, lambda: None, always=True))
        return found

    def _why_not(self, source: Source) -> str:
        if source is Source.PLUGIN:
            return f"there is no plug-in for {self.target.engine}"
        if source is Source.TAP:
            return "off in the settings (sidecar.tap)"
        return "not configured (sidecar.relay)"

    def _plugin_connected(self) -> None:
        self.selection.choose()

    def _switched(self, source: Source) -> None:
        if source is Source.SCRAPE:
            self.engine_metrics.publish_requests = True
        else:
            self.engine_metrics.stop_requests()

    async def _attach_again(self) -> Target:
        found = await attach(
            self.target.url,
            engine=self.config.engine or self.target.engine,
            model_version=self.config.model_version,
        )
        if found.server != self.target.server:  # the same URL: never in practice
            raise AttachError(f"{found.url} is another server now")
        return found

    async def _restarted(self, target: Target) -> None:
        identity = _identity(target)
        if identity != self.pipeline.identity:
            self.engine_metrics.forget_identity()
        self.pipeline.identity = self.engine_metrics.identity = identity
        self.classifier.engine_start = target.start_unix_seconds
        self.scrape.retarget(target)
        await self.control.engine_restarted()


def _identity(target: Target) -> Identity:
    return Identity(
        engine=target.engine,
        server=target.server,
        model_name=target.model_name,
        model_version=target.model_version,
        gpu_model=target.gpu_model,
    )


def _pusher(
    config: SidecarConfig, session: aiohttp.ClientSession, server_label: str
) -> Pusher | None:
    if not config.collector_url:
        return None
    word = ""
    if config.collector_token_file:
        word = token.read_token(Path(config.collector_token_file).expanduser())
    return Pusher(
        http_post(session, config.collector_url, word),
        sidecar_id=f"{socket.gethostname()}/{server_label}"[:128],
        epoch=time.time_ns() // 1_000_000,
        queue_records=config.push_queue_records,
        batch_records=config.push_batch_records,
        interval_seconds=config.push_interval_seconds,
        attempts=config.push_attempts,
    )

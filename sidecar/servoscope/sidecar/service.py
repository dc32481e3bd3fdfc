"""One sidecar: attach to an engine, see its requests, publish, push, steer; until cancelled.

Only wiring lives here. Every loop is a task of its own; a source, the collector or the engine that
fails is a metric, not an end. What ends the sidecar: cancellation, SIGTERM, or a fault of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from servoscope.exporters.hosts import known_hosts
from servoscope.exporters.knobs.client import find_knob_sockets
from servoscope.exporters.paths import run_dir, state_dir
from servoscope.exporters.records import Source
from servoscope.sidecar.api import server
from servoscope.sidecar.api.control_api import ControlApi
from servoscope.sidecar.api.guard import HostGuard
from servoscope.sidecar.api.report import Report
from servoscope.sidecar.attach import announce
from servoscope.sidecar.attach.llamacpp import SettingsOf, boot_values
from servoscope.sidecar.attach.processes import engine_start
from servoscope.sidecar.attach.target import Target, attach
from servoscope.sidecar.attach.watch import EngineWatch
from servoscope.sidecar.control import token
from servoscope.sidecar.control.audit import AuditLog
from servoscope.sidecar.control.knobs import KnobControl
from servoscope.sidecar.measure.aggregate import Aggregate
from servoscope.sidecar.measure.classify import Classifier
from servoscope.sidecar.measure.pipeline import Identity, Pipeline
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.publish.host_metrics import HostMetrics
from servoscope.sidecar.publish.knob_metrics import KnobMetrics
from servoscope.sidecar.publish.outlet import Outlet
from servoscope.sidecar.sources.candidates import Candidates
from servoscope.sidecar.sources.load_poll import LoadPoll
from servoscope.sidecar.sources.loads import LoadsPoll
from servoscope.sidecar.sources.plugin import PluginSource
from servoscope.sidecar.sources.preflight import insist
from servoscope.sidecar.sources.scrape_loop import ScrapeLoop
from servoscope.sidecar.sources.selection import Selection
from servoscope.sidecar.sources.slots import SlotsPoll

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.sidecar.config import SidecarConfig

__all__ = ["Sidecar", "run_sidecar"]

log = logging.getLogger(__name__)

_END_SECONDS = 3.0


async def run_sidecar(
    target_url: str,
    config: SidecarConfig,
    objectives: Sequence[Objective],
    *,
    say: Callable[[str], None] = log.info,
) -> None:
    """Attach to ``target_url`` and serve until cancelled or SIGTERM.

    ``say`` gets a line for people when it is known who sees the requests, and at each change.
    Raises AttachError when there is nothing to attach to, OSError when no port is free or what was
    asked for (tap, relay) cannot be had,
    TokenError or PermissionError when the token or the runtime directory cannot be used.
    """
    config.validate()
    target = await attach(target_url, engine=config.engine, model_version=config.model_version)
    async with aiohttp.ClientSession(trust_env=False) as session:
        await Sidecar(target, config, objectives, session, say=say).run()


class Sidecar:
    """The parts of one sidecar, wired."""

    def __init__(
        self,
        target: Target,
        config: SidecarConfig,
        objectives: Sequence[Objective],
        session: aiohttp.ClientSession,
        *,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.config = config
        self._say = say
        self._announced = False
        self.clock = time.time
        self.registry = Registry()
        identity = _identity(target)
        self.classifier = Classifier(
            config.types,
            long_prompt_tokens=config.long_prompt_tokens,
            long_output_tokens=config.long_output_tokens,
            warmup_seconds=config.warmup_seconds,
            trust_probe_header=config.labels.trust_probe_header,
            engine_start=lambda: engine_start(self.target.processes, self.clock()),
        )
        self.outlet = Outlet(config, objectives, session, target.server, state_dir())
        self.pusher = self.outlet.pusher
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
        self.control = KnobControl(
            config.control,
            AuditLog(state_dir() / "audit.jsonl", config.control.max_audit_bytes),
            target.server,
            lambda: find_knob_sockets(self.target.run_dirs, self.target.pids),
            engine=target.engine,
            clock=self.clock,
            forbidden=lambda: self.outlet.policy.refuses_knobs,
            version=lambda: self.target.version,
            boot_values=lambda: boot_values(self.target),
        )
        self.plugin = PluginSource(
            lambda: (self.target.run_dirs, list(self.target.pids)),
            alive=lambda: self.watch.alive,
            clock=self.clock,
            on_connect=self._plugin_connected,
        )
        candidates = Candidates(config, lambda: self.target, self.plugin, state_dir())
        self.selection = Selection(
            candidates.build(),
            self.pipeline.take,
            clock=self.clock,
            on_switch=self._switched,
            scraped_until=lambda: self.scrape.counted_until,
        )
        self.loads = self._loads_of(session, candidates)
        self.report = Report(
            registry=self.registry,
            loads=self.loads,
            watch=self.watch,
            scrape=self.scrape,
            selection=self.selection,
            pipeline=self.pipeline,
            aggregate=self.aggregate,
            classifier=self.classifier,
            control=self.control,
            host_metrics=self.host_metrics,
            outlet=self.outlet,
            tap_asked=config.tap == "on",
            refused_hosts=lambda: self.guard.refused,
            steady=time.monotonic,
        )
        self.guard = HostGuard(
            known_hosts(config.listen, config.allowed_hosts, socket.gethostname())
        )
        self.port = 0

    def _loads_of(self, session: aiohttp.ClientSession, candidates: Candidates) -> LoadPoll | None:
        """What tells the load at the rate that control needs, where the engine has such a thing."""
        if self.config.loads_interval_seconds == 0:
            return None
        if self.target.engine == "sglang":
            return LoadsPoll(
                session, lambda: self.target, self.engine_metrics,
                interval_seconds=self.config.loads_interval_seconds,
                timeout_seconds=self.config.scrape_timeout_seconds,
                settings=candidates.settings,
            )  # fmt: skip
        if self.target.engine == "llamacpp":
            return SlotsPoll(
                session, lambda: self.target, self.engine_metrics,
                interval_seconds=self.config.loads_interval_seconds,
                timeout_seconds=self.config.scrape_timeout_seconds,
                settings=SettingsOf(lambda: self.target), busy=lambda: self.scrape.shows_work,
            )  # fmt: skip
        return None

    @property
    def target(self) -> Target:
        """The engine as it was found last."""
        return self.watch.target

    async def run(self) -> None:
        """Serve until cancelled or SIGTERM; then give the knobs back and send what is queued."""
        insist(self.config, self.target)
        token_path = state_dir() / "token"
        api = ControlApi(self.control, token.load_token(token_path))
        app = server.create_app(
            self.report.render, self._inspect, self.report.not_ready, api, self.guard
        )
        listener = server.bind(self.config.listen, self.config.port, self.config.port_attempts)
        self.port = listener.getsockname()[1]
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(server.serving(app, listener))
            stack.push_async_callback(self._end)
            place = server.registered(
                run_dir(), self.target.server, self.port, self.config.listen, token_path
            )
            stack.enter_context(place)
            await self._run_tasks()

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
            self.outlet.policy.run(),
        ]
        if self.pusher is not None:
            jobs.append(self.pusher.run())
        if self.loads is not None:
            jobs.append(self.loads.run())
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
        """Each on its own: a collector that hangs must not keep the knobs."""
        endings = [self.control.aclose()]
        if self.pusher is not None:
            endings.append(self.pusher.flush())
        tasks = [asyncio.wait_for(ending, _END_SECONDS) for ending in endings]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("at the end: %r", result)
        if self.outlet.spool is not None:
            await self.outlet.spool.aclose()

    async def _read_rest(self) -> None:
        """In the rhythm of the scrape: processes, GPUs, knobs."""
        await self.host_metrics.read(self.target)
        states = await self.control.states()
        self.knob_metrics.publish(states, self.pipeline.identity, self.target.identity)

    def _plugin_connected(self) -> None:
        self.selection.choose()

    async def _inspect(self) -> dict[str, Any]:
        return {**await self.report.inspect(), "relay": self.config.relay}

    def _switched(self, source: Source) -> None:
        self._announce(source)
        if source is Source.SCRAPE:
            self.engine_metrics.publish_requests = True
        else:
            self.engine_metrics.stop_requests()

    def _announce(self, source: Source) -> None:
        better = itertools.takewhile(
            lambda c: c.source is not self.selection.in_force, self.selection.candidates
        )
        if self._announced:
            self._say(announce.seen_by(source))
        else:
            shown = f"[{self.config.listen}]" if ":" in self.config.listen else self.config.listen
            metrics_url = f"http://{shown}:{self.port}/metrics"
            self._say(announce.attached(self.target, metrics_url, source))
        self._announced = True
        for line in announce.better_ones(better):
            self._say(line)

    async def _attach_again(self) -> Target:
        found = await attach(
            self.target.url,
            engine=self.config.engine or self.target.engine,
            model_version=self.config.model_version,
        )
        # The same URL: our name for it stays, also if it listens on other addresses now.
        return dataclasses.replace(found, server=self.target.server)

    async def _restarted(self, target: Target) -> None:
        identity = _identity(target)
        if identity != self.pipeline.identity:
            self.engine_metrics.forget_identity()
        self.pipeline.identity = self.engine_metrics.identity = identity
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

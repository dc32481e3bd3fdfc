"""What ``servoscope inspect`` shows: the engine, its processes and GPUs, sources, knobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from servoscope.exporters.engines import parser_for
from servoscope.exporters.gpu import read_gpus
from servoscope.exporters.knobs.client import find_knob_sockets
from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.exporters.vllm.requests import find_stats_sockets
from servoscope.sidecar.attach.llamacpp import SettingsOf, boot_values
from servoscope.sidecar.attach.sglang import engine_files
from servoscope.sidecar.attach.target import AttachError, attach, identify
from servoscope.sidecar.control.kinds import OBSERVE_ONLY, knob_kind, with_boot_values
from servoscope.sidecar.measure.pipeline import Identity
from servoscope.sidecar.publish.engine_metrics import EngineMetrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.publish.host_metrics import gpus_of, process_rows
from servoscope.sidecar.sources import plugin, request_file, scrape
from servoscope.sidecar.sources.slots import SlotsPoll
from servoscope.sidecar.tap.source import tap_missing

if TYPE_CHECKING:
    from servoscope.exporters.records import GpuSample, Knob
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.config import SidecarConfig

__all__ = ["inspect_url", "payload"]

SLI_ABSENT = (
    "no source sees single requests: SLI counters, goodput and request types are absent; "
    "what the engine itself counts is published, marked source=scrape"
)


def payload(
    target: Target,
    *,
    processes: Iterable[dict[str, Any]],
    gpus: Iterable[GpuSample],
    sources: Iterable[SourceStatus],
    knobs: Sequence[Knob],
    in_force: Source | None,
    knobs_why: str = "",
    policy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Plain JSON values. ``in_force``: whose requests count, ``None`` when nobody looks."""
    return {
        "engine": target.engine,
        "version": target.version,
        "server": target.server,
        "url": target.url,
        "model_name": target.model_name,
        "model_version": target.model_version,
        "gpu_model": target.gpu_model,
        "start_unix_seconds": target.start_unix_seconds,
        "processes": list(processes),
        "gpus": [{"index": g.index, "gpu_model": g.gpu_model, "uuid": g.uuid} for g in gpus],
        "requests_from": None if in_force is None else in_force.value,
        "absent": [SLI_ABSENT] if in_force is Source.SCRAPE else [],
        "sources": [
            {
                "source": s.source.value,
                "state": s.state.value,
                "detail": s.detail,
                "blind_to": list(s.blind_to),
                "last_success_unix_seconds": s.last_success_unix_seconds,
                "read_seconds": s.read_seconds,
            }
            for s in sources
        ],
        "knobs": [k.as_json() for k in knobs],
        "knobs_why": knobs_why,
        "policy": policy,  # of the collector, as the sidecar heard it; None: nobody asks
    }


async def inspect_url(
    url: str, config: SidecarConfig, *, engine: str | None = None
) -> dict[str, Any]:
    """Look once at the server at ``url`` without a sidecar; changes nothing there.

    Raises AttachError, also when the server does not answer like the ``engine`` it is said to be.
    """
    named = engine or config.engine
    target = await attach(url, engine=named, model_version=config.model_version)
    scraped = await _scrape(target, config)
    if named is not None:
        await _believe(target, scraped)
    knobs, why = await _knobs(target)
    samples = await asyncio.to_thread(read_gpus)
    return payload(
        target,
        processes=await asyncio.to_thread(process_rows, target),
        gpus=gpus_of(target, samples),
        sources=[
            *([_file(target, config)] if target.engine == "sglang" else [_plugin(target)]),
            _tap(target, config),
            _relay(config),
            *([_otlp(config)] if target.engine == "sglang" else []),
            scraped,
            *([await _slots(target, config, scraped)] if target.engine == "llamacpp" else []),
        ],
        knobs=knobs,
        in_force=None,
        knobs_why=why,
    )


async def _believe(target: Target, scraped: SourceStatus) -> None:
    """A named kind is believed where its metrics are there, or it says itself what it is."""
    if scraped.last_success_unix_seconds is not None:
        return
    try:
        async with aiohttp.ClientSession(trust_env=False) as session:
            found = await identify(session, target.url)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise AttachError(f"{target.url} does not answer any more: {why}") from error
    if found is None or found.engine != target.engine:
        seems = f"it answers like {found.engine}" if found else scraped.detail or "no metrics"
        raise AttachError(
            f"{target.url} does not answer like {target.engine} ({seems}); "
            "leave --engine out to let the server say what it is"
        )


async def _knobs(target: Target) -> tuple[list[Knob], str]:
    paths = find_knob_sockets(target.run_dirs, target.pids)
    kind = knob_kind(target.engine)
    if kind is None:
        return [], OBSERVE_ONLY.format(target.engine)
    told = boot_values(target)
    if not paths:
        return with_boot_values(kind.describe([]), told), kind.why_none(target.version)
    try:
        async with asyncio.timeout(5.0):
            group = await kind.connect(paths)
            try:
                return with_boot_values(kind.describe(await group.get()), told), ""
            finally:
                with contextlib.suppress(OSError):
                    await group.aclose()
    except (OSError, TimeoutError, RuntimeError) as error:
        return [], f"the engine's knobs do not answer: {error or type(error).__name__}"


def _plugin(target: Target) -> SourceStatus:
    if target.engine != "vllm":
        detail = f"there is no plug-in for {target.engine}"
        return SourceStatus(source=Source.PLUGIN, detail=detail)
    found = find_stats_sockets(target.run_dirs, target.pids)
    detail = f"the engine has it: {found[0]}" if found else plugin.INSTALL_HINT
    state = SourceState.IDLE if found else SourceState.OFF
    return SourceStatus(source=Source.PLUGIN, state=state, detail=detail, blind_to=plugin.BLIND_TO)


def _file(target: Target, config: SidecarConfig) -> SourceStatus:
    files = engine_files(target)
    missing = request_file.not_written(files.settings, allow_text=config.sglang_allow_prompt_text)
    if missing is None and files.directory is not None and not os.access(files.directory, os.R_OK):
        missing = f"{files.directory} cannot be read by this user"
    if not config.request_file:
        missing = "off in the settings (sidecar.request_file)"
    return SourceStatus(
        source=Source.FILE,
        state=SourceState.OFF if missing else SourceState.IDLE,
        detail=missing or f"the engine writes {files.told_directory}",
        blind_to=request_file.BLIND_TO,
    )


def _otlp(config: SidecarConfig) -> SourceStatus:
    return SourceStatus(source=Source.OTLP, detail=config.otlp or "not configured (sidecar.otlp)")


def _tap(target: Target, config: SidecarConfig) -> SourceStatus:
    pid = next(iter(target.pids), None)
    missing = tap_missing(target.host, target.port, pid)
    why = "off in the settings" if config.tap == "off" else missing
    return SourceStatus(source=Source.TAP, detail=why or "possible: a sidecar would use it")


def _relay(config: SidecarConfig) -> SourceStatus:
    return SourceStatus(source=Source.RELAY, detail=config.relay or "not configured")


async def _slots(target: Target, config: SidecarConfig, scraped: SourceStatus) -> SourceStatus:
    """One question for /slots, where it does no harm."""
    identity = Identity(target.engine, target.server, "", "", "")
    async with aiohttp.ClientSession(trust_env=False) as session:
        poll = SlotsPoll(
            session,
            lambda: target,
            EngineMetrics(Registry(), identity),
            interval_seconds=1.0,
            timeout_seconds=config.scrape_timeout_seconds,
            settings=SettingsOf(lambda: target),
            busy=lambda: scraped.state is SourceState.OK,
        )
        await poll.once()
    return poll.status(time.monotonic())


async def _scrape(target: Target, config: SidecarConfig) -> SourceStatus:
    state = scrape.ScrapeState(interval_seconds=5.0, max_interval_seconds=60.0, cost_ratio=0.05)
    async with aiohttp.ClientSession(trust_env=False) as session:
        fetched = await scrape.fetch(
            session,
            f"{target.url}/metrics",
            timeout_seconds=config.scrape_timeout_seconds,
            max_bytes=config.scrape_max_bytes,
        )
    if fetched.text is None:
        state.failed(fetched, time.monotonic())
    else:
        start = time.monotonic()
        sample = parser_for(target.engine, target.version).parse(fetched.text)
        fetched = fetched.and_reading(time.monotonic() - start)
        working = (sample.total("running") or 0) + (sample.total("waiting") or 0) > 0
        state.read(fetched, sample, busy=working, now=time.monotonic(), at=time.time())
    return state.status(time.monotonic())

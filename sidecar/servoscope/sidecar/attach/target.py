"""Find out what serves at a URL: engine, version, model, processes, GPU. Changes nothing there.

Asks each path once with a short timeout and a bounded answer. ``attach`` raises AttachError with
what to do next; ``identify`` answers ``None`` where nobody of the known kinds lives (discovery).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from servoscope.exporters.gpu import gpu_model_of, read_gpus
from servoscope.exporters.paths import run_dir
from servoscope.exporters.sglang.settings import SETTING_NAMES
from servoscope.sidecar.attach import model, processes
from servoscope.sidecar.attach.canonical import locate, parts_of_url, server_label
from servoscope.sidecar.attach.llamacpp import kept_of_props
from servoscope.sidecar.attach.processes import ServerProcess
from servoscope.sidecar.attach.unanswered import reason_of

__all__ = [
    "SUPPORTED",
    "Answers",
    "AttachError",
    "Target",
    "attach",
    "describe",
    "identify",
    "split_url",
]

SUPPORTED = ("vllm", "sglang", "llamacpp")
_TIMEOUT = aiohttp.ClientTimeout(total=5.0, connect=2.0)
_MAX_ANSWER_BYTES = 1024 * 1024
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "llama.cpp": "llamacpp"}
_MAX_NAME_CHARACTERS = 128


class AttachError(Exception):
    """There is nothing here that can be attached to; the text says what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server, as found. ``pids`` maps to roles; empty when its processes cannot be seen."""

    url: str
    host: str
    port: int
    server: str  # the label: host:port, the same however the server is addressed
    engine: str
    version: str | None
    model_name: str
    model_version: str
    gpu_model: str = "none"
    pids: Mapping[int, str] = field(default_factory=dict)
    uid: int | None = None
    start_unix_seconds: float | None = None
    argv: tuple[str, ...] = ()
    run_dirs: list[Path] = field(default_factory=list)
    processes: tuple[ServerProcess, ...] = ()
    #: How the engine was started, as far as it says and we need it (SGLang, llama.cpp).
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def supported(self) -> bool:
        """Whether this version of Servoscope can read this kind of engine."""
        return self.engine in SUPPORTED

    @property
    def identity(self) -> tuple[tuple[int, float], ...] | None:
        """Which life of the server this is, or ``None`` when its processes cannot be seen."""
        listening = [p for p in self.processes if p.role in ("api", "server")]
        return tuple(sorted((p.pid, p.start_seconds) for p in listening)) or None


@dataclass(frozen=True, slots=True)
class Answers:
    """What a server said of itself."""

    engine: str
    version: str | None = None
    model_name: str | None = None
    root: str | None = None
    reported: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def split_url(url: str) -> tuple[str, str, int]:
    """(base URL, host, port) of what a user typed. Raises AttachError."""
    try:
        scheme, host, port = parts_of_url(url)
    except ValueError as error:
        raise AttachError(str(error)) from error
    return f"{scheme}://{server_label(host, port)}", host, port


async def get_json(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """Status and JSON of one answer; ``None`` for a body that is no JSON or too large.

    Raises OSError, TimeoutError or aiohttp.ClientError when there is no answer.
    """
    async with session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
        body = bytearray()
        async for chunk in answer.content.iter_chunked(65_536):
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                return answer.status, None
        try:
            return answer.status, json.loads(body)
        except (ValueError, RecursionError):
            return answer.status, None


async def identify(
    session: aiohttp.ClientSession, base: str, *, thorough: bool = True
) -> Answers | None:
    """Who serves at ``base``, by /v1/models and then one path of the kind it names.

    Where the list does not say, every known path is tried; unless ``thorough``, only if there is
    a list at all or it is locked: a web page of somebody else gets one request.

    Raises OSError, TimeoutError or aiohttp.ClientError when nobody answers at all.
    """
    status, listed = await get_json(session, f"{base}/v1/models")
    entry = _first_model(listed)
    if not (thorough or entry or status in (401, 403)):
        return None
    engine = _OWNERS.get(str(entry.get("owned_by", "")).lower())
    answers = await _details(session, base, engine)
    if answers is None:
        return None
    engine, details = answers
    if engine == "llamacpp":
        props, settings = kept_of_props(details)
        version, root, alias = props.build, props.model_path, props.model_alias
    else:
        settings = {name: details[name] for name in SETTING_NAMES if name in details}
        version, root = details.get("version"), entry.get("root")
        alias = details.get("served_model_name")
    name = entry.get("id") or alias
    return Answers(
        engine=engine,
        version=str(version)[:64] if version else None,
        model_name=str(name)[:_MAX_NAME_CHARACTERS] if name else None,
        root=root if isinstance(root, str) else None,
        reported=model.reported_version(entry, details),
        settings=settings,
    )


def _first_model(listed: Any) -> Mapping[str, Any]:
    data = listed.get("data") if isinstance(listed, dict) else None
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return data[0]
    return {}


async def _details(
    session: aiohttp.ClientSession, base: str, engine: str | None
) -> tuple[str, Mapping[str, Any]] | None:
    """(engine, its answer) from the one path that the kind has; all of them when it is unknown."""
    paths = {
        "vllm": ("/version",),
        "llamacpp": ("/props",),
        "sglang": ("/server_info", "/get_server_info"),
    }
    marks = {"vllm": "version", "llamacpp": "total_slots", "sglang": "version"}
    for kind in (engine,) if engine else ("vllm", "sglang", "llamacpp"):
        for path in paths[kind]:
            status, found = await get_json(session, base + path)
            if status == 200 and isinstance(found, dict) and marks[kind] in found:
                return kind, found
    return (engine, {}) if engine else None


async def attach(
    url: str, *, engine: str | None = None, model_version: str | None = None
) -> Target:
    """Look at the server at ``url``. ``engine`` and ``model_version`` overrule what is found.

    Raises AttachError, which says what to do next.
    """
    base, host, port = split_url(url)
    async with aiohttp.ClientSession(trust_env=False) as session:
        try:
            answers = await identify(session, base)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            plain = base.startswith("http:")
            speaks = "" if plain else ", and does it speak https, not plain http"
            raise AttachError(
                f"nothing answers at {base} ({reason_of(error)}). Is the engine up{speaks}? "
                "An engine that is still loading its model does not answer yet; check the address "
                f"with: curl {base}/health"
            ) from error
    if answers is None and engine is None:
        raise AttachError(
            f"{base} answers, but not like an engine that Servoscope knows. If you know what it "
            f"is, say so: --engine {'|'.join(SUPPORTED)}"
        )
    kind = engine or (answers.engine if answers else "unknown")
    if kind not in SUPPORTED:
        raise AttachError(
            f"{base} is {kind}, which this version cannot read yet "
            f"(it reads {', '.join(SUPPORTED)})"
        )
    said = replace(answers, engine=kind) if answers else Answers(kind)
    return await asyncio.to_thread(describe, base, host, port, said, model_version)


def describe(base: str, host: str, port: int, answers: Answers, flag: str | None = None) -> Target:
    """A target from what the server said and from what this host shows of its processes.

    ``flag`` is the model version that the user named, if any. Reads /proc and asks NVML: blocking.
    """
    engine = answers.engine
    place = locate(host, port)
    found: Sequence[ServerProcess] = ()
    if processes.is_local(host):
        found = processes.server_processes(engine, port, place.pids)
    main = found[0] if found else None
    argv = main.argv if main else ()
    location = model.model_location(argv, answers.root)
    hashed = model.config_hash(location, _cwd(main.pid) if main else None)
    name = answers.model_name or model.argument(argv, "--served-model-name") or location
    pids = {p.pid: p.role for p in found}
    return Target(
        url=base,
        host=host,
        port=port,
        server=server_label(place.host, port),
        engine=engine,
        version=answers.version,
        model_name=name or "unknown",
        model_version=model.model_version(flag, argv, answers.reported, hashed),
        gpu_model=gpu_model_of(pids, read_gpus()) if pids else "none",
        pids=pids,
        uid=main.uid if main else None,
        start_unix_seconds=main.start_unix_seconds if main else None,
        argv=argv,
        run_dirs=_run_dirs(main),
        processes=tuple(found),
        settings=answers.settings,
    )


def _cwd(pid: int) -> Path | None:
    try:
        return Path(psutil.Process(pid).cwd())
    except (psutil.Error, OSError):
        return None


def _run_dirs(main: ServerProcess | None) -> list[Path]:
    """Where the plug-in of this server may have its sockets: its user's place, then ours."""
    found: dict[Path, None] = {}
    if main is not None and main.uid is not None:
        environment = processes.process_environment(main.pid)
        found[run_dir(environment, main.uid)] = None
    found[run_dir()] = None
    return list(found)

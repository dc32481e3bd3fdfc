"""``servoscope inspect URL``: what an engine is and what can be seen of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, TextIO

from servoscope.cli.ending import EXIT_CODES_AT_ONCE
from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.servers import one_url, server_of
from servoscope.cli.settings import load_settings
from servoscope.cli.sidecars import (
    Registered,
    find_sidecar,
    registered_sidecars,
    request,
)
from servoscope.exporters.engines import ENGINES
from servoscope.sidecar.api.inspection import inspect_url
from servoscope.sidecar.attach.target import AttachError

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "what an engine is, which sources are in force, what they cannot see"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES_AT_ONCE
    parser.add_argument("url", help="the engine, e.g. http://127.0.0.1:8000")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--engine", choices=ENGINES, help="what the engine is (default: ask the server)"
    )


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Ask the server's sidecar if one runs; else look ourselves, once, changing nothing."""
    payload = _from_sidecar(args.url)
    if payload is None:
        settings = load_settings(args.config)
        try:
            payload = asyncio.run(
                inspect_url(one_url(args.url), settings.sidecar, engine=args.engine)
            )
        except AttachError as error:
            raise CommandError(str(error)) from error
    elif args.engine and payload.get("engine") != args.engine:
        raise CommandError(
            f"the sidecar at {payload['sidecar']} holds this engine as {payload.get('engine')}, "
            f"not {args.engine}; leave --engine out to see what it says"
        )
    out.write(json.dumps(payload, indent=2) + "\n" if args.json else text(payload))
    return 0


def _from_sidecar(url: str) -> Mapping[str, Any] | None:
    try:
        sidecar = find_sidecar(url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _behind_relay(url) if sidecar is None else _asked(sidecar)


def _behind_relay(url: str) -> Mapping[str, Any] | None:
    """What the sidecar says whose relay listens at ``url``."""
    wanted = {server_of(url), server_of(one_url(url))}
    for sidecar in registered_sidecars():
        payload = _asked(sidecar)
        relay = payload.get("relay") if payload else None
        if payload and isinstance(relay, str) and server_of(relay) in wanted:
            return {**payload, "relay_of": sidecar.server}
    return None


def _asked(sidecar: Registered) -> Mapping[str, Any] | None:
    try:
        answer = request(sidecar, "/api/v1/inspect")
    except (OSError, ValueError):  # it ended meanwhile, or somebody else has its port
        return None
    return {**answer.body, "sidecar": sidecar.url} if answer.status == 200 else None


def text(payload: Mapping[str, Any], now: float | None = None) -> str:
    """The payload for people. ``now``: seconds since the epoch, for ages."""
    version = payload.get("version") or "unknown version"
    relay = [f"this is the relay of {payload['relay_of']}"] if payload.get("relay_of") else []
    lines = [
        *relay,
        f"{payload.get('engine')} {version} at {payload.get('server')}",
        f"model      {payload.get('model_name')}  version {payload.get('model_version')}",
        f"sidecar    {payload.get('sidecar') or _none_attached(payload)}",
        "processes",
    ]
    for process in payload.get("processes") or []:
        resident = process.get("resident_bytes")
        memory = f"{resident / 2**20:,.0f} MiB" if resident else ""
        lines.append(f"  {process['pid']:>8}  {process.get('role', ''):<8} {memory}".rstrip())
    gpus = payload.get("gpus") or []
    lines.append("GPUs" if gpus else "GPUs       none that this host shows")
    lines += [f"  {gpu.get('index')}  {gpu.get('gpu_model')}  {gpu.get('uuid')}" for gpu in gpus]
    lines.append("sources")
    for source in payload.get("sources") or []:
        detail = f"  {source['detail']}" if source.get("detail") else ""
        lines.append(f"  {source['source']:<8} {source['state']:<9}{detail}".rstrip())
        if source.get("blind_to") and source["state"] != "off":
            lines.append(f"  {'':<8} cannot see: {'; '.join(source['blind_to'])}")
    knobs = payload.get("knobs") or []
    lines.append(f"knobs      {payload.get('knobs_why') or ('' if knobs else 'none')}".rstrip())
    for knob in knobs:
        value = "-" if knob.get("value") is None else f"{knob['value']:g}"
        bounds = ""
        if knob.get("minimum") is not None and knob.get("maximum") is not None:
            bounds = f"{knob['minimum']:g}..{knob['maximum']:g}"
        lines.append(
            f"  {knob['name']:<30} {value:>8}  {bounds:<14} {knob['mode']:<8} "
            f"{knob.get('why') or ''}".rstrip()
        )
    lines += _policy(payload.get("policy"), time.time() if now is None else now)
    return "\n".join(lines) + "\n"


def _none_attached(payload: Mapping[str, Any]) -> str:
    return f"none attached; attach one:  servoscope sidecar {payload.get('url')}"


def _policy(policy: Mapping[str, Any] | None, now: float) -> list[str]:
    """What the collector said, how long ago, and what is wrong with it."""
    if policy is None:
        return ["policy     nobody asks for it: a sidecar would"]
    heard = policy.get("last_success_unix_seconds")
    words = []
    if heard is not None:
        same = "other objectives" if policy.get("slo_mismatch") else "the same objectives"
        frozen = ", frozen by a drift" if policy.get("drift_freeze") else ""
        age = max(0.0, now - heard)  # two clocks, or one that was set
        words = [
            f"control mode {policy.get('control_mode')}{frozen}, {same}, heard {age:.0f} s ago"
        ]
    why = [str(policy[key]) for key in ("detail", "refuses_knobs") if policy.get(key)]
    first, *more = [*words, *why] or [""]
    head = f"policy     {policy.get('state') or 'unknown'}"
    return [f"{head}  {first}".rstrip(), *(f"{'':<11}{line}" for line in more)]

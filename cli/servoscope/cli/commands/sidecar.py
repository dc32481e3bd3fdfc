"""``servoscope sidecar URL``: attach to one engine and publish its numbers."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Coroutine
from typing import Any, TextIO

from servoscope.cli.ending import EXIT_CODES, until_told
from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.servers import one_url, server_of
from servoscope.cli.settings import SettingsError, load_settings
from servoscope.exporters.engines import ENGINES
from servoscope.sidecar.attach.target import AttachError
from servoscope.sidecar.config import SidecarConfig
from servoscope.sidecar.control.token import TokenError
from servoscope.sidecar.service import run_sidecar

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "attach to one engine and publish its numbers"

#: flag → field of SidecarConfig; a flag that is not given leaves the configured value.
FLAGS = {
    "listen": "listen",
    "port": "port",
    "engine": "engine",
    "model_version": "model_version",
    "tap": "tap",
    "relay": "relay",
    "otlp": "otlp",
    "collector": "collector_url",
    "warmup_seconds": "warmup_seconds",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES
    parser.add_argument("url", help="the engine, e.g. http://127.0.0.1:8000")
    parser.add_argument("--listen", metavar="ADDRESS", help="address of /metrics and the API")
    parser.add_argument(
        "--port", type=int, help="its port, or the first free one after it (default: 9790)"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help="what the engine is (default: ask the server)"
    )
    parser.add_argument("--model-version", metavar="V", help="model_version label (default: found)")
    parser.add_argument(
        "--tap",
        nargs="?",
        const="on",
        choices=("auto", "on", "off"),
        help="passive capture of the engine's port; auto: where no plug-in is in the engine and "
        "the right is there (CAP_NET_RAW)",
    )
    parser.add_argument(
        "--relay",
        metavar="HOST:PORT",
        help="listen there and pass requests through to the engine, measuring them",
    )
    parser.add_argument(
        "--otlp",
        metavar="HOST:PORT",
        help="take SGLang's trace spans there (OTLP over HTTP, protobuf)",
    )
    parser.add_argument("--collector", metavar="URL", help="where records go; 'off' for nowhere")
    parser.add_argument(
        "--warmup-seconds",
        type=float,
        metavar="S",
        help="requests this soon after an engine start are probes, in no SLI",
    )


def configured(args: argparse.Namespace, config: SidecarConfig) -> SidecarConfig:
    """``config`` with the flags that were given. Raises SettingsError naming the flag's key."""
    given = {
        field: getattr(args, flag)
        for flag, field in FLAGS.items()
        if getattr(args, flag) is not None
    }
    if given.get("collector_url") == "off":
        given["collector_url"] = ""
    try:
        changed = dataclasses.replace(config, **given)
        changed.validate()
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return changed


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Run until SIGINT or SIGTERM: then knobs are given back, queued records sent, exit code 0."""
    del out
    try:
        server_of(args.url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = load_settings(args.config)
    config = configured(args, settings.sidecar)
    work = run_sidecar(one_url(args.url), config, settings.objectives(), say=_say)
    try:
        _run(until_told(work))
    except (AttachError, TokenError, OSError) as error:  # no port, no right, no such directory
        raise CommandError(str(error)) from error
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop  # noqa: PLC0415 - a faster loop where it is installed, not a need
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)

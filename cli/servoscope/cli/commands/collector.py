"""``servoscope collector``: keep request records of a fleet and answer for them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
from pathlib import Path
from typing import TextIO

from servoscope.cli.ending import EXIT_CODES, until_told
from servoscope.cli.main import CommandError
from servoscope.cli.settings import SettingsError, load_settings
from servoscope.collector.app import run_collector
from servoscope.collector.store import StoreError

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "keep request records of a fleet and answer for them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES
    parser.add_argument("--listen", metavar="ADDRESS", help="address (default: loopback)")
    parser.add_argument("--port", type=int, help="port (default: 9780)")
    parser.add_argument("--database", metavar="FILE", help="DuckDB file")


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Run until SIGINT or SIGTERM: then what was taken is stored, exit code 0."""
    del out
    settings = load_settings(args.config)
    given = {key: value for key in ("listen", "port") if (value := getattr(args, key)) is not None}
    if args.database:
        given["database"] = Path(args.database)
    try:
        config = dataclasses.replace(settings.collector, **given)
        config.validate()
    except ValueError as error:
        raise SettingsError(f"collector.{error}") from error
    # The database engine makes its write-ahead log when it wants to, with the mode of the umask.
    os.umask(0o077)
    try:
        asyncio.run(until_told(run_collector(config, settings.objectives())))
    except (StoreError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0

"""``servoscope config check|show``."""

from __future__ import annotations

import argparse
from typing import TextIO

from servoscope.cli.ending import EXIT_CODES_AT_ONCE
from servoscope.cli.settings import as_yaml, load_settings

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "check or show the configuration in force"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES_AT_ONCE
    parser.add_argument(
        "action",
        choices=("check", "show"),
        help="check: every problem, by key; show: the whole configuration in force, as YAML",
    )
    parser.add_argument("file", nargs="?", help="the file (default: the one in force)")


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Check or show. A wrong configuration exits with 2 (see main)."""
    settings = load_settings(args.file or args.config)
    objectives = settings.objectives()
    if args.action == "show":
        out.write(f"# from: {settings.origin}\n")
        out.write(as_yaml(settings))
        return 0
    names = ", ".join(f"{o.service}/{o.name}" for o in objectives)
    out.write(f"ok: {settings.origin}; {len(objectives)} objectives: {names}\n")
    return 0

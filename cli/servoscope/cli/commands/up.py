"""``servoscope up``: find the LLM servers of this host, attach to each, show live numbers.

With no server here it starts the embedded one (the real llama.cpp server with a tiny random model)
and replays the trace sample that ships with the product. All that it started ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TextIO

from servoscope.cli.ending import EXIT_CODES
from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.servers import server_of
from servoscope.cli.settings import load_settings
from servoscope.cli.stack import Stack, StackError

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "find LLM servers on this host, attach to each, show live numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES
    parser.add_argument("urls", nargs="*", metavar="URL", help="attach to these (default: find)")
    parser.add_argument(
        "--embedded",
        action="store_true",
        help="start the embedded engine even if others run here",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="end by itself (default: until Ctrl-C)"
    )
    parser.add_argument(
        "--window",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="what the view looks back on (default: 300)",
    )


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Run until SIGINT, SIGTERM or the end of ``--minutes``: then all is ended, exit code 0."""
    if args.minutes is not None and args.minutes <= 0:
        raise UsageError("--minutes must be more than 0")
    if not 10 <= args.window <= 86_400:
        raise UsageError("--window must be between 10 and 86400 seconds")
    if args.embedded and args.urls:
        raise UsageError("--embedded starts an engine of its own: leave it or the URLs out")
    try:
        for url in args.urls:
            server_of(url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = load_settings(args.config)
    stack = Stack(
        settings,
        out,
        config_file=args.config,
        urls=tuple(args.urls),
        embedded=args.embedded,
        window_seconds=args.window,
    )
    try:
        return asyncio.run(stack.run(None if args.minutes is None else args.minutes * 60.0))
    except StackError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        return 130

"""The ``servoscope`` command: finds the subcommand and runs it.

Data goes to standard output, logs and progress to standard error. Exit codes: 0 done, 1 it failed
(the message says what to do next), 2 the command or the configuration is wrong, 130 interrupted.
For ``up``, ``sidecar`` and ``collector`` an interrupt is the usual end: once they have begun, they
end in order on SIGINT and SIGTERM with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, TextIO, cast

__all__ = ["CommandError", "UsageError", "main", "run"]


class CommandError(Exception):
    """A command could not do its work; the text says why and what to do next."""

    exit_code = 1


class UsageError(CommandError):
    """The command line is wrong; the text names the word and what would be accepted."""

    exit_code = 2


class Command(Protocol):
    """One module in ``servoscope.cli.commands``."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags."""

    def execute(self, args: argparse.Namespace, out: TextIO) -> int:
        """Do the work; return the exit code."""


#: name -> module. A module is imported only when its command is asked for (or for its help).
COMMANDS: dict[str, str] = {
    "up": "servoscope.cli.commands.up",
    "sidecar": "servoscope.cli.commands.sidecar",
    "collector": "servoscope.cli.commands.collector",
    "inspect": "servoscope.cli.commands.inspect",
    "knobs": "servoscope.cli.commands.knobs",
    "slo": "servoscope.cli.commands.slo",
    "config": "servoscope.cli.commands.config",
    "parse": "servoscope.cli.commands.parse",
}

SUMMARIES: dict[str, str] = {
    "up": "find LLM servers on this host, attach to each, show live numbers",
    "sidecar": "attach to one engine and publish its numbers",
    "collector": "keep request records of a fleet and answer for them",
    "inspect": "what an engine is, which sources are in force, what they cannot see",
    "knobs": "read, set or release an engine's knobs through its sidecar",
    "slo": "compile objectives into Prometheus rules and an Alertmanager configuration",
    "config": "check or show the configuration in force",
    "parse": "what a saved /metrics text says, what is unknown in it and what was refused",
}


def version() -> str:
    """The installed version, or ``unknown`` when run from a bare source tree."""
    from importlib import metadata  # noqa: PLC0415 - slow; see _loading

    try:
        return metadata.version("servoscope")
    except metadata.PackageNotFoundError:
        return "unknown"


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole parser; with ``only`` just that command's flags are loaded."""
    parser = argparse.ArgumentParser(
        prog="servoscope",
        description="Observability, SLOs and live tuning for LLM serving engines.",
        epilog="Try:  servoscope up    or    servoscope inspect http://127.0.0.1:8000",
    )
    parser.add_argument("--version", action="version", version=f"servoscope {version()}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="servoscope.yaml to use (default: $SERVOSCOPE_CONFIG, ./servoscope.yaml, "
        "/etc/servoscope/servoscope.yaml; none of them: defaults)",
    )
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="more on standard error (twice: debug)"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module_name in COMMANDS.items():
        sub = commands.add_parser(name, help=SUMMARIES[name], description=SUMMARIES[name])
        if only in (None, name):
            cast("Command", importlib.import_module(module_name)).add_arguments(sub)
    return parser


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Ctrl-C while modules load ends at once and silently: nothing has begun that would need care.

    As an exception it could come out of any half-run import, in any shape. What is slow to import
    is therefore imported inside this.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv: Sequence[str], out: TextIO) -> int:
    """Run one command line and return its exit code."""
    named = next((a for a in argv if a in COMMANDS), "")
    with _loading():
        from servoscope.cli.settings import SettingsError  # noqa: PLC0415 - see _loading

        args = build_parser(named or "-").parse_args(list(argv))
        command = cast("Command", importlib.import_module(COMMANDS[args.command]))
    level = {0: logging.WARNING, 1: logging.INFO}.get(args.verbose, logging.DEBUG)
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return command.execute(args, out)
    except SettingsError as error:
        print(f"servoscope: configuration: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"servoscope {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def run() -> None:
    """Entry point of the console script."""
    try:
        code = main(sys.argv[1:], sys.stdout)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    # By its own name: as __main__ this module's CommandError is not the one commands raise.
    importlib.import_module("servoscope.cli.main").run()

"""``servoscope knobs URL get|set NAME=VALUE|release``: through the server's sidecar."""

from __future__ import annotations

import argparse
import getpass
import json
from typing import Any, TextIO

from servoscope.cli.ending import EXIT_CODES_AT_ONCE
from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.sidecars import Registered, SidecarAnswer, find_sidecar, request

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "read, set or release an engine's knobs through its sidecar"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES_AT_ONCE
    parser.add_argument("url", help="the engine, e.g. http://127.0.0.1:8000")
    actions = parser.add_subparsers(dest="action", metavar="get|set|release", required=True)
    get = actions.add_parser("get", help="show knobs, bounds and modes")
    get.add_argument("--json", action="store_true", help="as JSON")
    change = actions.add_parser("set", help="change knobs now; they revert when the sidecar ends")
    change.add_argument("changes", nargs="+", metavar="NAME=VALUE", help="e.g. chunk_tokens=256")
    change.add_argument("--json", action="store_true", help="as JSON")
    release = actions.add_parser("release", help="give the knobs back: boot values at once")
    release.add_argument("--json", action="store_true", help="as JSON")


def parse_changes(texts: list[str]) -> dict[str, float]:
    """``["chunk_tokens=256"]`` → {"chunk_tokens": 256}. Raises UsageError naming the text."""
    changes: dict[str, float] = {}
    for text in texts:
        name, sep, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not sep or not name or number != number:  # noqa: PLR0124 - NaN
            raise UsageError(f"{text!r} is not NAME=NUMBER, e.g. chunk_tokens=256")
        if name in changes:
            raise UsageError(f"{name} is set twice")
        changes[name] = int(number) if number.is_integer() else number
    return changes


def _sidecar(url: str) -> Registered:
    try:
        found = find_sidecar(url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if found is None:
        raise CommandError(
            f"no sidecar of {url} runs on this host as this user. "
            f"Start one:  servoscope sidecar {url}"
        )
    return found


def _call(sidecar: Registered, path: str, body: dict[str, Any] | None = None) -> SidecarAnswer:
    try:
        return request(sidecar, path, body)
    except PermissionError as error:
        raise CommandError(
            f"cannot read the token {sidecar.token_path}: run as the user of the sidecar"
        ) from error
    except OSError as error:
        raise CommandError(f"the sidecar at {sidecar.url} does not answer: {error}") from error


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Read or change knobs."""
    changes = parse_changes(args.changes) if args.action == "set" else {}
    sidecar = _sidecar(args.url)
    if args.action == "get":
        answer = _call(sidecar, "/api/v1/knobs")
    elif args.action == "set":
        answer = _call(sidecar, "/api/v1/knobs", {"set": changes, "actor": getpass.getuser()})
    else:
        answer = _call(sidecar, "/api/v1/knobs/release", {"actor": getpass.getuser()})
    if answer.status != 200:
        raise CommandError(str(answer.body.get("error") or answer.body))
    if args.json:
        out.write(json.dumps(answer.body, indent=2) + "\n")
    else:
        out.write(table(answer.body))
    return 0


def table(body: Any) -> str:
    """Knobs as aligned text."""
    rows = [("knob", "value", "boot", "min", "max", "mode", "")]
    for knob in body.get("knobs", []):
        numbers = [_number(knob.get(k)) for k in ("value", "boot_value", "minimum", "maximum")]
        rows.append((knob["name"], *numbers, knob["mode"], knob.get("why") or ""))
    widths = [max(len(str(row[i])) for row in rows) for i in range(6)]
    lines = []
    if applied := body.get("applied"):
        lines.append("applied: " + ", ".join(f"{k}={_number(v)}" for k, v in applied.items()))
    if len(rows) > 1:
        for row in rows:
            cells = [str(cell).ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append(("  ".join(cells) + "  " + row[6]).rstrip())
    if why := body.get("why"):
        lines.append(str(why))
    if not lines:
        lines.append("the engine shows no knobs")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:g}"

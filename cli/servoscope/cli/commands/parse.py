"""``servoscope parse FILE|-``: what one /metrics text says, and what in it was not understood."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.settings import unreadable
from servoscope.exporters.engines import ENGINES
from servoscope.exporters.exposition import MAX_BYTES
from servoscope.exporters.packed import unpacked
from servoscope.exporters.report import report_of
from servoscope.exporters.table import parse_version

__all__ = ["HELP", "add_arguments", "execute", "text"]

HELP = "what a saved /metrics text says, what is unknown in it and what was refused"

_EPILOG = """\
Reads the Prometheus or OpenMetrics text of an engine, as `curl -s URL/metrics` saves it; gzip is
undone. At most 16 MiB of text are read. Attach the output of --json to a bug report: it holds
numbers, metric names and labels (the model's name among them), and no prompt.

--json is {engine, version, signals, absent, absent_by_design, unknown, refused, ...}. Of each
signal: {value, unit, labels, kind, rule, series}. Series of several ranks, models, tiers or
reasons are all in `series`; `value` is their sum, or the largest where rule is max; of a histogram
it is the mean. The version is not written in any engine's metrics: without --version what is
absent by design cannot be told from what is missing.

Exit codes: 0 read; 1 a value was refused, no engine was recognised, or the file cannot be read;
2 the command is wrong.
"""
_MAX_LISTED = 40
_OURS = b"\nservoscope_build_info"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the text; - is standard input")
    parser.add_argument(
        "--engine", choices=ENGINES, help="whose text it is (default: by its metric names)"
    )
    parser.add_argument(
        "--version", dest="engine_version", metavar="V", help="the engine's, e.g. 0.10.2"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Read, report, and say by the exit code whether all of it was believed."""
    data, why = unpacked(_bytes(args.file), MAX_BYTES)
    found = report_of(data, engine=args.engine, version=args.engine_version)
    if why:
        found["truncated"] = True
        found["refused_total"] += 1
        found["refused"].insert(0, {"name": "text", "value": "", "why": why})
    if args.json:
        out.write(json.dumps(found, indent=2, allow_nan=False) + "\n")
    else:
        out.write(text(found, colour=_wants_colour(out)))
    if found["engine"] is None or not found["signals"]:
        print(f"servoscope parse: {_nothing(found, args.file, data)}", file=sys.stderr)
        return 1
    return 1 if found["refused_total"] else 0


def _bytes(name: str) -> bytes:
    """One byte more than the bound, so that the parser sees and says that it was cut."""
    try:
        if name == "-":
            return _bounded(sys.stdin.buffer)
        with Path(name).expanduser().open("rb") as file:
            return _bounded(file)
    except OSError as error:
        if name.startswith(("http://", "https://")):
            raise UsageError(
                f"{name} is no file; pipe it:  curl -s {name} | servoscope parse -"
            ) from error
        raise CommandError(unreadable(name, error)) from error


def _bounded(stream: BinaryIO) -> bytes:
    return stream.read(MAX_BYTES + 1)


def _wants_colour(out: TextIO) -> bool:
    """Only a terminal, and one that was not asked to be plain (NO_COLOR, TERM=dumb)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _nothing(found: Mapping[str, Any], file: str, data: bytes) -> str:
    name = "standard input" if file == "-" else _clean(file)
    if found["engine"] is not None and found["refused_total"]:
        return f"no number of {found['engine']} in {name} could be believed"
    if found["engine"] is not None:
        return f"no number of {found['engine']} in {name} is known"
    ours = " (it is a sidecar's; name the engine's own)" if _OURS in data else ""
    return (
        f"no metric of {', '.join(ENGINES)} in {name}{ours}; save one with: "
        "curl -s http://HOST:PORT/metrics -o metrics.txt (llama.cpp: started with --metrics, "
        "SGLang: with --enable-metrics)"
    )


def text(found: Mapping[str, Any], *, colour: bool = False) -> str:
    """The report for people. Control characters of names and labels do not reach the terminal."""
    return "\n".join(_Picture(found, colour=colour).lines()) + "\n"


class _Picture:
    """Lines of one report."""

    def __init__(self, found: Mapping[str, Any], *, colour: bool) -> None:
        self._found = found
        self._colour = colour

    def lines(self) -> Iterator[str]:
        found = self._found
        yield f"engine     {found['engine'] or 'not recognised'}{self._others()}"
        version = found["version"]
        yield f"version    {_version(version)}"
        cut = self._styled("  the text was cut short", "31") if found["truncated"] else ""
        yield f"series     {found['read_series']}{cut}"
        yield from self._signals()
        yield from self._absent()
        unknown = found["unknown"]
        yield from self._listed("unknown", "33", [_clean(name) for name in unknown], len(unknown))
        refused = [_refused(entry) for entry in found["refused"]]
        yield from self._listed("refused", "31", refused, found["refused_total"])

    def _others(self) -> str:
        ours, recognised = self._found["engine"], self._found["recognised"]
        others = ", ".join(f"{n} {kind}" for kind, n in recognised.items() if kind != ours)
        return f"  (the text also holds {others} series; choose with --engine)" if others else ""

    def _signals(self) -> Iterator[str]:
        signals = self._found["signals"]
        if not signals:
            return
        width = max(len(name) for name in signals)
        yield ""
        yield self._styled(f"{'signal':<{width}}  {'value':>14}  {'unit':<8} of", "1")
        for name, signal in signals.items():
            value = f"{_number(signal['value']):>14}"
            yield f"{name:<{width}}  {value}  {_unit(signal):<8} {_of(signal)}".rstrip()
            if len(signal["series"]) > 1:
                yield from self._series(signal, width)

    def _series(self, signal: Mapping[str, Any], width: int) -> Iterator[str]:
        for series in signal["series"][:_MAX_LISTED]:
            own = {k: v for k, v in series["labels"].items() if k not in signal["labels"]}
            shown = f"  {_labels(own):<{width - 2}}  {_number(series['value']):>14}"
            yield self._styled(shown, "2")
        more = len(signal["series"]) - _MAX_LISTED
        if more > 0:
            yield f"  and {more} more series"

    def _absent(self) -> Iterator[str]:
        by_design = set(self._found["absent_by_design"])
        missing = [name for name in self._found["absent"] if name not in by_design]
        version = _clean(self._found["version"] or "")
        if by_design:
            yield ""
            yield f"not in {version}: {', '.join(sorted(by_design))}"
        if missing:
            yield ""
            yield f"absent: {', '.join(missing)}"

    def _listed(self, title: str, code: str, entries: list[str], total: int) -> Iterator[str]:
        if not total:
            return
        yield ""
        yield self._styled(f"{title} ({total})", code)
        yield from (f"  {entry}" for entry in entries[:_MAX_LISTED])
        if total > min(len(entries), _MAX_LISTED):
            yield f"  and {total - min(len(entries), _MAX_LISTED)} more"

    def _styled(self, line: str, code: str) -> str:
        return f"\x1b[{code}m{line}\x1b[0m" if self._colour else line


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"


def _version(version: str | None) -> str:
    if not version:
        return "not in the text; name it: --version"
    if parse_version(version) is None:
        return f"{_clean(version)}  (not the number of a release: read as if it were not known)"
    return _clean(version)


def _unit(signal: Mapping[str, Any]) -> str:
    return "" if signal["unit"] == "1" else str(signal["unit"])


def _of(signal: Mapping[str, Any]) -> str:
    shared, count = _labels(signal["labels"]), len(signal["series"])
    if signal["kind"] == "histogram":
        said = f"mean of {signal['count']:,.0f}"
    else:
        said = f"{signal['rule']} of {count}" if count > 1 else ""
    return "  ".join(part for part in (said, shared) if part)


def _refused(entry: Mapping[str, str]) -> str:
    value = f" = {_clean(entry['value'])}" if entry["value"] else ""
    return f"{_clean(entry['name'])}{value}: {_clean(entry['why'])}"


def _labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{_clean(name)}={_clean(value)}" for name, value in labels.items())


def _clean(value: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)

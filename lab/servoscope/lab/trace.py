"""Readers of public request traces: lengths and arrivals of real traffic, never its text.

* Azure 2023/2024 (``TIMESTAMP,ContextTokens,GeneratedTokens``): arrivals to 0.1 us, no prefixes.
* Mooncake (``{"timestamp": ms, "input_length", "output_length", "hash_ids"}``): timestamps rounded
  to 3 s; ``hash_ids`` name the prompt's leading blocks of 512 tokens, equal ids are equal prefixes.

Readers are generators over lines. A bad line is refused with its number and why, is counted, and
costs nothing but itself.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

__all__ = [
    "MAX_REQUESTS",
    "MOONCAKE_BLOCK_TOKENS",
    "BadLine",
    "Refusals",
    "TraceError",
    "TraceRequest",
    "azure",
    "mooncake",
    "read_trace",
]

MAX_REQUESTS = 2_000_000
MAX_LINE_CHARACTERS = 262_144
MAX_TOKENS = 10_000_000
MAX_BLOCKS = 32_768
MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """The file as a whole cannot be read as a trace of that kind."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. ``arrival_seconds`` counts from the trace's first good line.

    ``prefix`` names the prompt's leading blocks of MOONCAKE_BLOCK_TOKENS tokens; None where the
    trace does not say.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A refused line: its number (the first is 1) and why."""

    number: int
    why: str


@dataclass(slots=True)
class Refusals:
    """How many lines were refused; the first ``keep`` of them with their reasons."""

    total: int = 0
    first: list[BadLine] = field(default_factory=list)
    keep: int = 20

    def add(self, number: int, why: str) -> None:
        """Count one refused line."""
        self.total += 1
        if len(self.first) < self.keep:
            self.first.append(BadLine(number, why))


class _BadLineError(ValueError):
    pass


def azure(lines: Iterable[str], refusals: Refusals) -> Iterator[TraceRequest]:
    """Requests of an Azure CSV. Raises TraceError when the header names other columns."""
    numbered = enumerate(lines, 1)
    header = next(csv.reader([_first_line(numbered)]), [])
    columns = tuple(name.strip() for name in header)
    if columns != _AZURE_COLUMNS:
        raise TraceError(f"header: {','.join(columns)[:80]!r} is not {','.join(_AZURE_COLUMNS)}")
    return _requests(numbered, _azure_line, refusals)


def mooncake(lines: Iterable[str], refusals: Refusals) -> Iterator[TraceRequest]:
    """Requests of a Mooncake JSON-lines file."""
    return _requests(enumerate(lines, 1), _mooncake_line, refusals)


_READERS = {".csv": azure, ".jsonl": mooncake}


def read_trace(path: Path, refusals: Refusals | None = None) -> Iterator[TraceRequest]:
    """Requests of a file: .csv is Azure's form, .jsonl Mooncake's.

    Raises TraceError naming the file for another suffix or a wrong header, OSError as open does.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: neither .csv (Azure) nor .jsonl (Mooncake)")
    noted = Refusals() if refusals is None else refusals
    try:
        yield from reader(_file_lines(path), noted)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _file_lines(path: Path) -> Iterator[str]:
    """Lines, each cut just beyond the bound so that no line can fill the memory."""
    with path.open(encoding="utf-8", errors="replace", newline=None) as file:
        while line := file.readline(MAX_LINE_CHARACTERS + 1):
            yield line
            while len(line) > MAX_LINE_CHARACTERS and not line.endswith("\n"):
                line = file.readline(MAX_LINE_CHARACTERS + 1)


def _first_line(numbered: Iterator[tuple[int, str]]) -> str:
    line = next(numbered, (0, ""))[1]
    if not line:
        raise TraceError("empty")
    return line[:1000]


_Fields = tuple[float, int, int, tuple[int, ...] | None]
_Parse = Callable[[str], _Fields]


def _requests(
    numbered: Iterator[tuple[int, str]], parse: _Parse, refusals: Refusals
) -> Iterator[TraceRequest]:
    begin: float | None = None
    good = 0
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            at, prompt, output, prefix = _fields(line, parse, begin)
        except _BadLineError as error:
            refusals.add(number, str(error))
            continue
        good += 1
        if good > MAX_REQUESTS:
            raise TraceError(f"line {number}: more than {MAX_REQUESTS} requests")
        begin = at if begin is None else begin
        yield TraceRequest(at - begin, prompt, output, prefix)


def _fields(line: str, parse: _Parse, begin: float | None) -> _Fields:
    if len(line) > MAX_LINE_CHARACTERS:
        raise _BadLineError(f"longer than {MAX_LINE_CHARACTERS} characters")
    fields = parse(line)
    if begin is not None and fields[0] < begin:
        raise _BadLineError("arrives before the first request")
    return fields


def _azure_line(line: str) -> _Fields:
    parts = line.strip().split(",")
    if len(parts) != len(_AZURE_COLUMNS):
        raise _BadLineError(f"{len(parts)} fields instead of {len(_AZURE_COLUMNS)}")
    try:
        moment = datetime.fromisoformat(parts[0])
    except ValueError:
        raise _BadLineError(f"TIMESTAMP: {parts[0][:40]!r} is no time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (
        moment.timestamp(),
        _whole("ContextTokens", parts[1]),
        _whole("GeneratedTokens", parts[2]),
        None,
    )


def _mooncake_line(line: str) -> _Fields:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _BadLineError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _BadLineError("not a JSON object")
    at = value.get("timestamp")
    if not isinstance(at, (int, float)) or isinstance(at, bool) or not 0 <= at < 1e15:
        raise _BadLineError(f"timestamp: {str(at)[:40]!r} is no number of milliseconds")
    blocks = value.get("hash_ids")
    if blocks is not None and (
        not isinstance(blocks, list)
        or len(blocks) > MAX_BLOCKS
        or not all(isinstance(b, int) and not isinstance(b, bool) for b in blocks)
    ):
        raise _BadLineError(f"hash_ids: not a list of at most {MAX_BLOCKS} whole numbers")
    return (
        at / 1000.0,
        _whole("input_length", value.get("input_length")),
        _whole("output_length", value.get("output_length")),
        None if blocks is None else tuple(blocks),
    )


def _whole(name: str, value: Any) -> int:
    """A token count: 1..MAX_TOKENS, as a number or as decimal digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise _BadLineError(f"{name}: {str(value)[:40]!r} is no count in 1..{MAX_TOKENS}")
    return value

"""One line of an exposition → a name, labels and a number, or the reason why not. Pure.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ with its quoted (UTF-8)
names, and the OpenMetrics text format 1.0. Timestamps and exemplars are checked for shape and left
out. Native histograms are refused as such: no engine writes them in text. Repetition inside the
expressions is possessive, so that no line makes them take more than linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "MAX_LABELS",
    "MAX_LABEL_CHARS",
    "MAX_LINE_CHARS",
    "MAX_NAME_CHARS",
    "LineError",
    "Sample",
    "read_block",
    "read_sample",
    "read_type",
]

MAX_LINE_CHARS = 16_384  # vllm:cache_config_info is the longest known: 1.3 KiB
MAX_NAME_CHARS = 256
MAX_LABELS = 128  # vllm:cache_config_info has 37
MAX_LABEL_CHARS = 4_096

_QUOTED = r'"((?:[^"\\]|\\.)*+)"'
_LABEL_BLOCK = r'\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\}'
_SAMPLE = re.compile(
    rf"""[ \t]*+
    (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*+)?+[ \t]*+
    (?P<labels>{_LABEL_BLOCK})?+[ \t]*+
    (?P<value>[^\s{{]\S*+)
    (?:[ \t]++(?P<timestamp>[^\s\#]\S*+))?+[ \t]*+
    (?P<exemplar>\#.*)?+""",
    re.VERBOSE,
)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*+[ \t]*+")
_BLOCK = re.compile(_LABEL_BLOCK)
_EXEMPLAR = re.compile(rf"#[ \t]*+{_LABEL_BLOCK}[ \t]++(\S++)(?:[ \t]++(\S++))?+[ \t]*+")
#: name="value", "name"="value", or the quoted name of the metric by itself.
_LABEL = re.compile(
    r"[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|"
    rf"{_QUOTED})[ \t]*+(?:=[ \t]*+{_QUOTED}[ \t]*+)?+(?:,|\Z)"
)
_REST = re.compile(r"[ \t]*+\Z")
_NATIVE = re.compile(r"[ \t}]\{[ \t]*+count[ \t]*+:")
_TYPE = re.compile(
    rf"#[ \t]*+TYPE[ \t]++(?:([a-zA-Z_:][a-zA-Z0-9_:]*+)|{_QUOTED})[ \t]++(\w++)[ \t]*+"
)
_ESCAPE = re.compile(r'\\([\\n"])')
_UNESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


class LineError(ValueError):
    """Why a line was not read."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line in its parts. ``series`` is its text up to the number, without the spaces."""

    series: str
    name: str | None  # None: it stands in the block, in quotes
    block: str
    value: float


def read_sample(line: str) -> Sample:
    """Read a line that is neither blank nor a comment. Raises LineError."""
    if len(line) > MAX_LINE_CHARS:
        raise LineError(f"longer than {MAX_LINE_CHARS} characters")
    match = _SAMPLE.fullmatch(line.rstrip("\r"))
    if match is None or (match["name"] is None and match["labels"] is None):
        raise LineError(_why_no_match(line.strip(" \t\r")))
    value = _number(match["value"], "value")
    if match["timestamp"] is not None:
        _number(match["timestamp"], "timestamp")
    if match["exemplar"] is not None:
        exemplar = _EXEMPLAR.fullmatch(match["exemplar"])
        if exemplar is None:
            raise LineError("text after the value is no exemplar")
        _number(exemplar[1], "exemplar value")
    end = match.end("labels") if match["labels"] is not None else match.end("name")
    return Sample(line[:end], match["name"], match["labels"] or "{}", value)


def read_type(comment: str) -> tuple[str, str] | None:
    """Metric and its declared type; ``None`` for every other comment."""
    match = _TYPE.fullmatch(comment)
    return (match[1] or _unescaped(match[2]), match[3].lower()) if match else None


def read_block(name: str | None, block: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Name and labels of a series; the name may be the first in the block. Raises LineError.

    A label with an empty value is no label: to Prometheus both are one series.
    """
    block = block[1:-1]
    labels: dict[str, str] = {}
    position = 0
    while not _REST.match(block, position):
        match = _LABEL.match(block, position)
        if match is None:
            raise LineError(f"labels cannot be read at {block[position : position + 24]!r}")
        bare, quoted, value = match.groups()
        label = bare if bare is not None else _unescaped(quoted)
        position = match.end()
        if value is None:
            if bare is not None or name is not None or labels:
                raise LineError(f"label {label[:32]!r} has no value")
            name = label
            continue
        if not label or label.startswith("__"):
            raise LineError(f"label name {label[:32]!r} is reserved")
        if label in labels:
            raise LineError(f"label {label[:32]!r} stands twice")
        if len(label) > MAX_NAME_CHARS or len(value) > MAX_LABEL_CHARS:
            raise LineError(f"label {label[:32]!r} is longer than {MAX_LABEL_CHARS} characters")
        if len(labels) >= MAX_LABELS:
            raise LineError(f"more than {MAX_LABELS} labels")
        labels[label] = _unescaped(value)
    if not name:
        raise LineError("no metric name")
    if len(name) > MAX_NAME_CHARS:
        raise LineError(f"name longer than {MAX_NAME_CHARS} characters")
    return name, tuple(sorted(pair for pair in labels.items() if pair[1]))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda m: _UNESCAPED[m[1]], text) if "\\" in text else text


def _number(text: str, what: str) -> float:
    # float() also takes 1_000 and digits of every script; the formats do not.
    if "_" not in text and text.isascii():
        try:
            return float(text)
        except ValueError:
            pass
    raise LineError(f"{what} {text[:32]!r} is no number")


def _why_no_match(line: str) -> str:
    if _NATIVE.search(line):
        return "a native histogram: only classic buckets are read"
    name = _NAME.match(line)
    if name is None and line[0] != "{":
        return "does not begin with a metric name"
    rest = line[name.end() :] if name else line
    if rest.startswith("{"):
        block = _BLOCK.match(rest)
        if block is None:
            return "the labels do not end"
        rest = rest[block.end() :]
    if not rest.strip(" \t"):
        return "no value"
    return "not of the form: name{labels} value [timestamp] [# exemplar]"

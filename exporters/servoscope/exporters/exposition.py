"""Prometheus text and OpenMetrics text → samples. Pure, bounded, quick from the second text on.

Theory of operation. Engines print the same thousands of lines at every scrape and change only
the number at their end. So a line is cut at its last space, and what is left of it is looked up:
a hit costs one dictionary access and one ``float``. The cache holds only texts that were read as
a complete series (``name`` or ``name{...}``), so a line whose left part hits can mean nothing
else than that series and one number. Everything else (new series, comments, timestamps,
exemplars, tabs, damage) takes the slow way through one regular expression.

What a line cannot be read for is refused with the reason, and nothing else is lost. Every table
is bounded by a constant below; repetition inside the expressions is possessive, so that no text
makes them take more than linear time.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and the OpenMetrics text
format 1.0. Timestamps, exemplars, HELP, UNIT are checked for shape and left out. Quoted
(UTF-8) metric names are refused: no engine writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from servoscope.exporters.records import Refused

__all__ = [
    "MAX_BYTES",
    "MAX_LABELS",
    "MAX_LABEL_CHARS",
    "MAX_LINES",
    "MAX_LINE_CHARS",
    "MAX_NAME_CHARS",
    "MAX_REFUSED",
    "MAX_SERIES",
    "Exposition",
    "Series",
    "TextParser",
]

MAX_BYTES = 16 * 1024 * 1024  # vLLM 0.32 writes 60 KiB a rank
MAX_LINES = 200_000
MAX_SERIES = 100_000
MAX_LINE_CHARS = 16_384  # vllm:cache_config_info is the longest known: 1.3 KiB
MAX_NAME_CHARS = 256
MAX_LABELS = 128  # vllm:cache_config_info has 37
MAX_LABEL_CHARS = 4_096
MAX_REFUSED = 100  # kept in the list; ``refused_total`` counts all

#: Comments and types kept from one text to the next, and how far a cache may outgrow its text.
_CACHE_SLACK = 1_024

_LABEL_BLOCK = r'\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\}'
_SAMPLE = re.compile(
    rf"""[ \t]*+
    (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+
    (?P<labels>{_LABEL_BLOCK})?+[ \t]*+
    (?P<value>[^\s{{]\S*+)
    (?:[ \t]++(?P<timestamp>[^\s\#]\S*+))?+[ \t]*+
    (?P<exemplar>\#.*)?+""",
    re.VERBOSE,
)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*+[ \t]*+")
_BLOCK = re.compile(_LABEL_BLOCK)
_EXEMPLAR = re.compile(rf"#[ \t]*+{_LABEL_BLOCK}[ \t]++(\S++)(?:[ \t]++(\S++))?+[ \t]*+")
_LABEL = re.compile(
    r"""[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(,|\Z)"""
)
_TYPE = re.compile(r"#[ \t]*+TYPE[ \t]++([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]++(\w++)[ \t]*+")
_ESCAPE = re.compile(r'\\([\\n"])')
_UNESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Name and labels of one series. One parser makes one object a series: compare with ``is``."""

    name: str
    labels: tuple[tuple[str, str], ...]  # sorted by label name


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """What one text said.

    ``types`` are the declared types by metric name, of this and earlier texts of the parser.
    ``truncated`` says that a bound cut the text or that its last line has no end.
    """

    samples: Mapping[Series, float]
    types: Mapping[str, str]
    refused: tuple[Refused, ...] = ()
    refused_total: int = 0
    truncated: bool = False


class _Refusal(Exception):  # noqa: N818 - a reason carried up two frames, never seen outside
    """Why a line was not read."""


class TextParser:
    """Reads the texts of ONE endpoint, one after the other. Not safe for use by two threads."""

    def __init__(self) -> None:
        self._by_text: dict[str, Series] = {}
        self._by_identity: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._comments: dict[str, tuple[str, str] | None] = {}
        self._types: dict[str, str] = {}

    def parse(self, text: str | bytes) -> Exposition:
        """Read one whole text; never raises for what is in it."""
        refusals = _Refusals()
        lines = _bounded_lines(text, refusals)
        samples: dict[Series, float] = {}
        read = 0
        known = self._by_text.get
        for index, line in enumerate(lines):
            left, _, number = line.rpartition(" ")
            series = known(left)
            if series is not None and "_" not in number and number.isascii():
                try:
                    samples[series] = float(number)
                except ValueError:
                    pass  # refused below, with the reason
                else:
                    read += 1
                    continue
            elif self._known_comment(line):
                continue
            try:
                found = self._read_line(line)
            except _Refusal as refusal:
                refusals.line(index, line, str(refusal))
                continue
            if found is None:
                continue
            if len(samples) >= MAX_SERIES:
                refusals.cut(f"more than {MAX_SERIES} series: the rest was not read")
                break
            samples[found[0]] = found[1]
            read += 1
        if read > len(samples):
            refusals.text(read - len(samples), "series written twice: the last value was taken")
        types = self._types
        self._forget(samples)
        return Exposition(
            samples=samples,
            types=types,
            refused=tuple(refusals.kept),
            refused_total=refusals.total,
            truncated=refusals.truncated,
        )

    def _known_comment(self, line: str) -> bool:
        declared = self._comments.get(line, "")
        if declared == "":
            return False
        if declared is not None:  # said again: a type can change when an engine is replaced
            self._types[declared[0]] = declared[1]
        return True

    def _read_line(self, line: str) -> tuple[Series, float] | None:
        """The slow way. ``None`` for blank lines and comments."""
        stripped = line.strip(" \t\r")
        if not stripped:
            return None
        if stripped[0] == "#":
            self._read_comment(line, stripped)
            return None
        if len(line) > MAX_LINE_CHARS:
            raise _Refusal(f"longer than {MAX_LINE_CHARS} characters")
        match = _SAMPLE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise _Refusal(_why_no_match(stripped))
        value = _number(match["value"], "value")
        if match["timestamp"] is not None:
            _number(match["timestamp"], "timestamp")
        if match["exemplar"] is not None:
            exemplar = _EXEMPLAR.fullmatch(match["exemplar"])
            if exemplar is None:
                raise _Refusal("text after the value is no exemplar")
            _number(exemplar[1], "exemplar value")
        end = match.end("labels") if match["labels"] is not None else match.end("name")
        return self._series(line[:end], match["name"], match["labels"] or "{}"), value

    def _series(self, text: str, name: str, block: str) -> Series:
        found = self._by_text.get(text)
        if found is None:
            if len(name) > MAX_NAME_CHARS:
                raise _Refusal(f"name longer than {MAX_NAME_CHARS} characters")
            labels = _read_labels(block[1:-1])
            found = self._by_identity.setdefault((name, labels), Series(name, labels))
            self._by_text[text] = found
        return found

    def _read_comment(self, line: str, stripped: str) -> None:
        match = _TYPE.fullmatch(stripped)
        declared = (match[1], match[2].lower()) if match else None
        if declared is not None and len(declared[0]) <= MAX_NAME_CHARS:
            self._types[declared[0]] = declared[1]
        if len(line) <= MAX_LINE_CHARS:
            self._comments[line] = declared

    def _forget(self, samples: Mapping[Series, float]) -> None:
        """Drop what the last text no longer had, once it outweighs what it had."""
        limit = 2 * len(samples) + _CACHE_SLACK
        if len(self._by_text) > limit or len(self._by_identity) > limit:
            self._by_text = {t: s for t, s in self._by_text.items() if s in samples}
            self._by_identity = {i: s for i, s in self._by_identity.items() if s in samples}
        if len(self._comments) > 2 * limit or len(self._types) > limit:
            self._comments, self._types = {}, {}


class _Refusals:
    """A bounded list and its full count."""

    def __init__(self) -> None:
        self.kept: list[Refused] = []
        self.total = 0
        self.truncated = False

    def text(self, value: object, why: str) -> None:
        self._add("text", str(value), why)

    def line(self, index: int, line: str, why: str) -> None:
        self._add("line", line[:64], f"line {index + 1}: {why}")

    def cut(self, why: str) -> None:
        self.truncated = True
        self._add("text", "", why)

    def _add(self, name: str, value: str, why: str) -> None:
        self.total += 1
        if len(self.kept) < MAX_REFUSED:
            self.kept.append(Refused(name, value, why))


def _bounded_lines(text: str | bytes, refusals: _Refusals) -> list[str]:
    """Lines of at most MAX_BYTES of ``text``, without one that was cut off in the middle."""
    if len(text) > MAX_BYTES:
        refusals.cut(f"longer than {MAX_BYTES} bytes: the rest was not read")
        text = text[:MAX_BYTES]
    if isinstance(text, bytes):
        decoded = text.decode("utf-8", errors="replace")
        if "\ufffd" in decoded:
            refusals.text(decoded.count("\ufffd"), "bytes that are not UTF-8 were replaced")
        text = decoded
    lines = text.split("\n", MAX_LINES)  # not splitlines(): U+2028 may stand in a label value
    last = lines.pop()
    if len(lines) == MAX_LINES and last:
        refusals.cut(f"more than {MAX_LINES} lines: the rest was not read")
    elif last.strip() == "# EOF":
        pass
    elif last.strip():
        # "requests 12" may be what is left of "requests 1234": a number cut short is a lie.
        refusals.truncated = True
        refusals.line(len(lines), last, "the text ends inside this line")
    return lines


def _read_labels(block: str) -> tuple[tuple[str, str], ...]:
    labels: dict[str, str] = {}
    position = 0
    while block[position:].strip(" \t"):
        match = _LABEL.match(block, position)
        if match is None:
            raise _Refusal(f"labels cannot be read at {block[position : position + 24]!r}")
        name, value = match[1], match[2]
        if name.startswith("__"):
            raise _Refusal(f"label name {name[:32]!r} is reserved")
        if name in labels:
            raise _Refusal(f"label {name[:32]!r} stands twice")
        if len(name) > MAX_NAME_CHARS or len(value) > MAX_LABEL_CHARS:
            raise _Refusal(f"label {name[:32]!r} is longer than {MAX_LABEL_CHARS} characters")
        if len(labels) >= MAX_LABELS:
            raise _Refusal(f"more than {MAX_LABELS} labels")
        labels[name] = _ESCAPE.sub(lambda m: _UNESCAPED[m[1]], value) if "\\" in value else value
        position = match.end()
    return tuple(sorted(labels.items()))


def _number(text: str, what: str) -> float:
    # float() also takes 1_000 and digits of every script; the formats do not.
    if "_" not in text and text.isascii():
        try:
            return float(text)
        except ValueError:
            pass
    raise _Refusal(f"{what} {text[:32]!r} is no number")


def _why_no_match(line: str) -> str:
    if line[0] in '{"':
        return "quoted metric names are not read"
    name = _NAME.match(line)
    if name is None:
        return "does not begin with a metric name"
    rest = line[name.end() :]
    if rest.startswith("{"):
        block = _BLOCK.match(rest)
        if block is None:
            return "the labels do not end"
        rest = rest[block.end() :]
    if not rest.strip(" \t"):
        return "no value"
    return "not of the form: name{labels} value [timestamp] [# exemplar]"

"""Prometheus text and OpenMetrics text → samples. Pure, bounded, quick from the second text on.

Theory of operation. Engines print the same thousands of lines at every scrape, in the same order,
and change only the number at their end. So a text is first laid beside the last one
(``exposition_shape``). Where the shape has changed, each line is cut at its last space, and what is
left of it is looked up. The cache holds only texts that were read as a complete series (``name``
or ``name{...}``), so a line whose left part hits can mean nothing else than that series and one
number. Everything else (new series, comments, timestamps, exemplars, tabs, damage) takes the slow
way through one regular expression.

What a line cannot be read for is refused with the reason (``exposition_line``), and nothing else is
lost. Every table is bounded by a constant below.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass

from servoscope.exporters.exposition_line import (
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_LINE_CHARS,
    MAX_NAME_CHARS,
    LineError,
    read_block,
    read_sample,
    read_type,
)
from servoscope.exporters.exposition_shape import MAX_LINES_OF_SHAPE, Series, Shape
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
MAX_REFUSED = 100  # kept in the list; ``refused_total`` counts all

#: Comments and types kept from one text to the next, and how far a cache may outgrow its text.
_CACHE_SLACK = 1_024


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


class TextParser:
    """Reads the texts of ONE endpoint, one after the other. Not safe for use by two threads."""

    def __init__(self) -> None:
        self._by_text: dict[str, Series] = {}
        self._by_identity: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._comments: dict[str, tuple[str, str] | None] = {}
        self._types: dict[str, str] = {}
        self._shape: Shape | None = None

    def parse(self, text: str | bytes) -> Exposition:
        """Read one whole text; never raises for what is in it."""
        refusals = _Refusals()
        whole = _bounded_text(text, refusals)
        samples = None
        if self._shape is not None and not refusals.total:
            samples = self._shape.read(whole, self._same_series)
        if samples is None:
            samples = self._anew(whole, refusals)
        types = self._types
        self._forget(samples)
        return Exposition(
            samples=samples,
            types=types,
            refused=tuple(refusals.kept),
            refused_total=refusals.total,
            truncated=refusals.truncated,
        )

    def _same_series(self, line: str, series: Series) -> float:
        """The slow way for one line. Raises LineError when it is another series or none."""
        found = self._read_line(line)
        if found is None or found[0] is not series:
            raise LineError("another series")
        return found[1]

    def _anew(self, text: str, refusals: _Refusals) -> dict[Series, float]:
        """Each line by itself: by the text left of its number, else the slow way."""
        lines, tail = _bounded_lines(text, refusals)
        samples: dict[Series, float] = {}
        heads: list[str] = []
        places: list[Series | None] = []
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
                    heads.append(line[: len(left) + 1])
                    places.append(series)
                    continue
            elif self._known_comment(line):
                heads.append("")
                places.append(None)
                continue
            if len(samples) >= MAX_SERIES:
                refusals.cut(f"more than {MAX_SERIES} series: the rest was not read")
                break
            try:
                found = self._read_line(line)
            except LineError as refusal:
                refusals.line(index, line, str(refusal))
                continue
            heads.append(f"{left} " if found is not None and known(left) is found[0] else "")
            places.append(found[0] if found is not None else None)
            if found is not None:
                samples[found[0]] = found[1]
                read += 1
        if read > len(samples):
            refusals.text(read - len(samples), "series written twice: the last value was taken")
        faultless = not refusals.total and len(lines) <= MAX_LINES_OF_SHAPE
        self._shape = Shape(lines, heads, places, samples, tail) if faultless else None
        return samples

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
        sample = read_sample(line)
        return self._series(sample.series, sample.name, sample.block), sample.value

    def _series(self, text: str, name: str | None, block: str) -> Series:
        found = self._by_text.get(text)
        if found is None:
            identity = read_block(name, block)
            found = self._by_identity.setdefault(identity, Series(*identity))
            self._by_text[text] = found
        return found

    def _read_comment(self, line: str, stripped: str) -> None:
        declared = read_type(stripped)
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
            self._comments, self._types, self._shape = {}, {}, None


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


def _bounded_text(text: str | bytes, refusals: _Refusals) -> str:
    """At most MAX_BYTES of ``text``, decoded."""
    if len(text) > MAX_BYTES:
        refusals.cut(f"longer than {MAX_BYTES} bytes: the rest was not read")
        text = text[:MAX_BYTES]
    if isinstance(text, bytes):
        # A shell of Windows saves UTF-16; its byte order mark is no text in UTF-8.
        wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decoded = text.decode("utf-16" if wide else "utf-8", errors="replace")
        if "\ufffd" in decoded:
            refusals.text(decoded.count("\ufffd"), "bytes that are not UTF-8 were replaced")
        text = decoded
    return text.removeprefix("\ufeff")


def _bounded_lines(text: str, refusals: _Refusals) -> tuple[list[str], str]:
    """At most MAX_LINES lines, and what follows the last line feed if it is no line cut off."""
    lines = text.split("\n", MAX_LINES)  # not splitlines(): U+2028 may stand in a label value
    last = lines.pop()
    if len(lines) == MAX_LINES and last:
        refusals.cut(f"more than {MAX_LINES} lines: the rest was not read")
    elif last.strip() and last.strip() != "# EOF":
        # "requests 12" may be what is left of "requests 1234": a number cut short is a lie.
        refusals.truncated = True
        refusals.line(len(lines), last, "the text ends inside this line")
    return lines, last

"""What an engine's table of metric names says: the form of every ``names.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from servoscope.exporters.catalog import Kind

__all__ = ["Kind", "Labels", "Line", "Ranks", "Table", "Version", "parse_version"]

Labels = tuple[tuple[str, str], ...]
Version = tuple[int, ...]


class Ranks(StrEnum):
    """How series of one signal are put together, over ranks or where several become one."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: an engine's metric, and the signal of ours that it is.

    ``name`` is without prefix and without ``_total``. ``since`` is the first version that was
    read and has it, ``until`` the first version read that no longer has it ("" is open): they
    say what to expect, not what to accept. ``labels`` are put on the reading, ``renamed`` keeps
    an engine's label under our name. Of the lines of one signal and one set of labels only those
    of the lowest ``preference`` that occur count (a metric published under its old and its new
    name is one metric); what then still falls together is put together by ``ranks``. A signal
    that is the sum of several metrics says how many in ``addends``: with fewer it would be too
    small, and is absent.
    """

    name: str
    signal: str
    kind: Kind
    ranks: Ranks
    since: str = ""
    until: str = ""
    labels: Labels = ()
    renamed: Labels = ()
    preference: int = 0
    addends: int = 1
    factor: float = 1.0  # engine's unit → ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that is known of one engine's metric names."""

    engine: str
    prefixes: tuple[str, ...]
    lines: tuple[Line, ...]
    not_used: frozenset[str]  # known names that mean nothing to us, without prefix and _total
    core: tuple[str, ...]  # signals that are reported as absent where they are
    rank_label: str = ""
    kept_labels: tuple[str, ...] = ()
    ignored_labels: frozenset[str] = frozenset()  # a deployment's labels: put together over them

    def absent_in(self, version: str | None) -> tuple[str, ...]:
        """Core signals that no line offers in ``version``; empty when the version is unknown."""
        parsed = parse_version(version)
        if parsed is None:
            return ()
        offered = {line.signal for line in self.lines if _offers(line, parsed)}
        return tuple(signal for signal in self.core if signal not in offered)


def parse_version(text: str | None) -> Version | None:
    """``"v0.10.2.dev3+gabc"`` → ``(0, 10, 2)``, ``"b11549"`` → ``(11549,)``, else ``None``."""
    match = re.match(r"[vb]?([0-9]{1,9}(?:\.[0-9]{1,9}){0,3})", text.strip()) if text else None
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _offers(line: Line, version: Version) -> bool:
    since, until = parse_version(line.since), parse_version(line.until)
    return (since is None or version >= since) and (until is None or version < until)

"""What an engine's table of metric names says: the form of every ``names.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from servoscope.exporters.catalog import Kind

__all__ = [
    "RAY_LABELS",
    "Kind",
    "Labels",
    "Line",
    "Ranks",
    "Table",
    "Version",
    "Where",
    "parse_version",
]

Labels = tuple[tuple[str, str], ...]
Version = tuple[int, ...]
Where = tuple[tuple[str, tuple[str, ...]], ...]

#: Put on every metric by Ray: which worker, on which node, for which replica.
RAY_LABELS = frozenset({
    "Application", "Component", "Deployment", "JobId", "NodeAddress", "NodeId", "ReplicaId",
    "SessionName", "Version", "WorkerId", "application", "deployment", "replica",
})  # fmt: skip


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
    an engine's label under our name. Of the lines of one signal and one model only those of the
    lowest ``preference`` that occur count (a metric published under its old and its new name, or
    by two parts of an engine, is one metric); what then still falls together is put together by
    ``ranks``. A signal that is the sum of several metrics says how many in ``addends``: with
    fewer it would be too small, and is absent.

    ``where`` names labels and the values of them that belong here ("" is a series without the
    label). ``whole`` names a label that splits a total which is published as well, and the value
    under which the total is: the parts are left out, or everything would count twice.

    ``after`` says what must have happened before an engine writes the series at all ("" is:
    nothing, or no more than a finished request): until then it is absent, and that is no fault.
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
    where: Where = ()
    whole: Labels = ()
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that is known of one engine's metric names.

    ``rank_label`` tells replicas apart: each has requests of its own, so counts are summed over
    it. ``mirror_labels`` tell apart processes that work on the SAME requests (tensor and pipeline
    ranks): of series that differ in nothing else the largest counts, once. Over
    ``ignored_labels`` everything is put together by the rule of the line.
    """

    engine: str
    prefixes: tuple[str, ...]
    lines: tuple[Line, ...]
    not_used: frozenset[str]  # known names that mean nothing to us, without prefix and _total
    core: tuple[str, ...]  # signals that are reported as absent where they are
    rank_label: str = ""
    mirror_labels: frozenset[str] = frozenset()
    kept_labels: tuple[str, ...] = ()
    renamed_labels: Labels = ()  # an engine's older label → one of ``kept_labels``
    ignored_labels: frozenset[str] = frozenset()
    not_used_series: frozenset[tuple[str, str, str]] = frozenset()  # name, label, value

    def absent_in(self, version: str | None) -> tuple[str, ...]:
        """Core signals that no line offers in ``version``; empty when the version is unknown."""
        if parse_version(version) is None:
            return ()
        return tuple(signal for signal in self.core if not self.lines_of(signal, version))

    def lines_of(self, signal: str, version: str | None) -> tuple[Line, ...]:
        """Lines that offer ``signal`` in ``version``; all of the signal when it is unknown."""
        parsed = parse_version(version)
        return tuple(
            line
            for line in self.lines
            if line.signal == signal and (parsed is None or _offers(line, parsed))
        )


def parse_version(text: str | None) -> Version | None:
    """``"v0.10.2.dev3+gabc"`` → ``(0, 10, 2)``, ``"b11549"`` → ``(11549,)``, else ``None``.

    ``None`` too for ``0.0.0…`` and ``0.1.dev…``: what builds from a checkout without tags say.
    """
    match = re.match(r"[vb]?([0-9]{1,9}(?:\.[0-9]{1,9}){0,3})", text.strip()) if text else None
    if match and re.match(r"v?0\.(?:0\.0|1\.dev)", match.string):
        return None
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _offers(line: Line, version: Version) -> bool:
    since, until = parse_version(line.since), parse_version(line.until)
    return (since is None or version >= since) and (until is None or version < until)

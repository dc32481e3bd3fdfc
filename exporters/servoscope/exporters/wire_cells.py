"""The cells of a batch on the wire: which are believed, which are not, and why.

A whole column is looked at in C first (kinds, minimum, maximum); single cells are looked at only
where that found a fault. Two kinds of refusal: a row without a believable identity (id, source,
outcome, phase, a label that is no text) is lost whole; an impossible measurement is replaced by
``None``, by the rules of ``RequestRecord.refuse_impossible``. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from servoscope.exporters.records import (
    COUNT_FIELDS,
    DURATION_FIELDS,
    MAX_TOKENS,
    WIRE_FIELDS,
    Outcome,
    Phase,
    RequestRecord,
    Source,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import StrEnum

__all__ = [
    "DEFAULTS",
    "MAX_INTEGER",
    "MAX_REPORTED",
    "MAX_TEXT",
    "Cells",
    "RefusedCell",
    "check_cells",
    "record_from_row",
    "short",
]

MAX_TEXT = 256  # characters of one label or id
MAX_REPORTED = 32  # refused cells named in an answer; all are counted
MAX_SECONDS = 86_400.0
MAX_INTEGER = 2**63 - 1
MAX_UNIX_SECONDS = 1e11  # the year 5138: the bound where the caller gives no clock

#: What a column holds that was not sent. Columns without a default are required.
DEFAULTS: dict[str, Any] = {
    f.name: None if f.default is MISSING else f.default
    for f in fields(RequestRecord)
    if f.name in WIRE_FIELDS
}
_ENUMS: dict[str, type[StrEnum]] = {"source": Source, "outcome": Outcome, "phase": Phase}
_LABELS = (
    "request_id", "engine", "server", "model_name", "model_version", "gpu_model", "request_type",
    "tenant",
)  # fmt: skip
_OPTIONAL_TEXT = ("finish_reason", "request_type_hint", "endpoint")
_SMALL_INTEGERS = {"status_code": (0, 999), "rank": (0, 65_535)}
_TIMES = ("received_unix_seconds", "first_token_unix_seconds", "finished_unix_seconds")
_MEASURED = (*DURATION_FIELDS, *COUNT_FIELDS, *_TIMES)
_NUMBERS: frozenset[Any] = frozenset({float, int, type(None)})
_INTEGERS: frozenset[Any] = frozenset({int, type(None)})
_BOOLEANS: frozenset[Any] = frozenset({bool, type(None)})


@dataclass(frozen=True, slots=True)
class RefusedCell:
    """A value that was not believed. ``row`` is its index in the batch as it was sent."""

    row: int
    field: str
    why: str
    row_lost: bool


@dataclass(kw_only=True)
class Cells:
    """Columns by wire field, all of one length, and what was refused of them."""

    columns: dict[str, list[Any]]
    refused: list[RefusedCell] = field(default_factory=list)
    refused_rows: int = 0
    refused_values: int = 0
    _lost: set[int] = field(default_factory=set)
    _sent_row: list[int] | None = None  # index as sent, once rows were dropped

    def lose(self, row: int, name: str, why: str) -> None:
        """Refuse a whole row because of one of its cells (its first fault counts)."""
        if row not in self._lost:
            self._lost.add(row)
            self.refused_rows += 1
            self._report(RefusedCell(row, name, why, row_lost=True))

    def blank(self, row: int, name: str, why: str) -> None:
        """Refuse one measurement; its row stays."""
        self.columns[name][row] = None
        self.refused_values += 1
        sent = row if self._sent_row is None else self._sent_row[row]
        self._report(RefusedCell(sent, name, why, row_lost=False))

    def drop_lost(self) -> None:
        """Take the lost rows out of every column."""
        if not self._lost:
            return
        rows = len(self.columns["request_id"])
        kept = [row for row in range(rows) if row not in self._lost]
        for name, values in self.columns.items():
            self.columns[name] = [values[row] for row in kept]
        self._sent_row = kept

    def _report(self, cell: RefusedCell) -> None:
        if len(self.refused) < MAX_REPORTED:
            self.refused.append(cell)


def check_cells(columns: dict[str, list[Any]], now: float = math.inf) -> Cells:
    """Check every cell of ``columns`` (all wire fields, one length) and drop the lost rows.

    The lists are changed in place. ``now`` (unix seconds) bounds the times.
    """
    now = min(now, MAX_UNIX_SECONDS)
    cells = Cells(columns=columns)
    for name, kind in _ENUMS.items():
        _check_enum(cells, name, kind)
    for name in _LABELS:
        _check_text(cells, name, nullable=False)
    for name in _OPTIONAL_TEXT:
        _check_text(cells, name, nullable=True)
    cells.drop_lost()
    for name, (low, high) in _SMALL_INTEGERS.items():
        _check_small(cells, name, low, high)
    _check_booleans(cells, "streaming")
    _refuse_impossible(cells, sorted(_suspect_numbers(cells.columns, now)), now)
    _refuse_impossible(cells, _suspect_relations(cells.columns), now)
    return cells


def record_from_row(row: tuple[Any, ...]) -> RequestRecord:
    """A record from values in ``WIRE_FIELDS`` order."""
    return RequestRecord(**dict(zip(WIRE_FIELDS, row, strict=True)))


def short(value: object) -> str:
    """A value as an error message may show it: bounded, and cheap for values of any size."""
    if isinstance(value, str):
        return repr(value[:48])
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) <= MAX_INTEGER else "a number above 2^63"
    return type(value).__name__


# ---- texts -----------------------------------------------------------------------------------


def _check_enum(cells: Cells, name: str, kind: type[StrEnum]) -> None:
    values = cells.columns[name]
    known: dict[Any, Any] = {member.value: member for member in kind}
    if DEFAULTS[name] is not None:
        known[None] = DEFAULTS[name]
    try:
        cells.columns[name] = [known[value] for value in values]
    except (KeyError, TypeError):  # TypeError: a list or an object cannot be looked up
        out = cells.columns[name] = []
        for row, value in enumerate(values):
            member = known.get(value) if value is None or isinstance(value, str) else None
            if member is None:
                cells.lose(row, name, f"{short(value)} is no {name}")
            out.append(member)


def _check_text(cells: Cells, name: str, *, nullable: bool) -> None:
    values = cells.columns[name]
    try:
        distinct = set(values)  # labels are few
        if not any(_text_fault(value, name, nullable=nullable) for value in distinct):
            return
    except TypeError:
        pass  # a list or an object where a text belongs: found again below, by row
    default = DEFAULTS[name]
    for row, value in enumerate(values):
        if value is None and default is not None:
            values[row] = default
        elif why := _text_fault(value, name, nullable=nullable):
            cells.lose(row, name, why)


def _text_fault(value: object, name: str, *, nullable: bool) -> str | None:
    if not isinstance(value, str):
        allowed = value is None and nullable
        return None if allowed else f"expected a text, got {short(value)}"
    if len(value) > MAX_TEXT:
        return f"{len(value)} characters, at most {MAX_TEXT}"
    if not value and name == "request_id":
        return "empty"
    if "\0" in value:
        return "holds a NUL character"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "not valid Unicode"
    return None


# ---- numbers ---------------------------------------------------------------------------------


def _check_small(cells: Cells, name: str, low: int, high: int) -> None:
    for row in _outside(cells.columns[name], _INTEGERS, low, high):
        value = cells.columns[name][row]
        cells.blank(row, name, f"{short(value)} is no whole number {low}..{high}")


def _check_booleans(cells: Cells, name: str) -> None:
    values = cells.columns[name]
    if _BOOLEANS.issuperset(map(type, values)):
        return
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, bool):
            cells.blank(row, name, f"expected true or false, got {short(value)}")


def _suspect_numbers(columns: dict[str, list[Any]], now: float) -> set[int]:
    """Rows with a number that is of the wrong kind, not finite, or out of its bounds."""
    suspects: set[int] = set()
    for names, kinds, low, high in (
        (DURATION_FIELDS, _NUMBERS, 0.0, MAX_SECONDS),
        (COUNT_FIELDS, _INTEGERS, 0, MAX_TOKENS),
        (_TIMES, _NUMBERS, 0.0, now + 60.0),
    ):
        for name in names:
            suspects.update(_outside(columns[name], kinds, low, high))
    return suspects


def _outside(values: list[Any], kinds: frozenset[Any], low: float, high: float) -> Iterable[int]:
    if kinds.issuperset(map(type, values)):
        present = [value for value in values if value is not None]
        # min and max alone do not see NaN; the sum is NaN when one of its parts is
        if not present or (
            min(present) >= low and max(present) <= high and not _is_nan(sum(present))
        ):
            return ()
    return [
        row
        for row, value in enumerate(values)
        if value is not None and not (type(value) in kinds and low <= value <= high)
    ]


def _is_nan(value: float) -> bool:
    return bool(value != value)  # noqa: PLR0124 - math.isnan overflows on big integers


def _suspect_relations(columns: dict[str, list[Any]]) -> list[int]:
    """Rows whose numbers contradict each other (which one is refused is the record's rule)."""
    rows = zip(
        columns["cached_tokens"], columns["prompt_tokens"],
        columns["received_unix_seconds"], columns["finished_unix_seconds"],
        columns["time_to_first_token_seconds"], columns["e2e_seconds"],
        strict=True,
    )  # fmt: skip
    return [
        row
        for row, (cached, prompt, received, finished, first, whole) in enumerate(rows)
        if (cached and prompt is not None and cached > prompt)
        or (received is not None and finished is not None and finished < received)
        or (first and whole is not None and first > whole)
    ]


def _refuse_impossible(cells: Cells, rows: Iterable[int], now: float) -> None:
    """Apply ``RequestRecord.refuse_impossible`` to single rows and take its verdict back."""
    columns = cells.columns
    for row in rows:
        for name in _MEASURED:
            value = columns[name][row]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                cells.blank(row, name, f"expected a number, got {short(value)}")
            elif isinstance(value, int) and abs(value) > MAX_INTEGER:
                cells.blank(row, name, "above 2^63")
            elif name in _TIMES and value < 0:
                cells.blank(row, name, "before 1970")
        record = record_from_row(tuple(columns[name][row] for name in WIRE_FIELDS))
        for refused in record.refuse_impossible(now, MAX_SECONDS):
            cells.blank(row, refused.name, refused.why)

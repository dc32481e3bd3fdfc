"""The wire form of finished requests, sidecar -> collector: one columnar batch of JSON.

``{"schema": ..., "sidecar_id": ..., "epoch": ..., "seq": ..., "columns": {name: [value, ...]}}``

``(sidecar_id, epoch, seq)`` is the idempotency key: ``epoch`` is fixed for one life of a sidecar
(its start time, say) and ``seq`` counts its batches; a batch that is sent again keeps its key AND
its rows. A column that holds nothing but its field's default is left out. Columns rather than rows
because the names are then sent, parsed and checked once a batch.

Only a broken envelope refuses the batch; what happens to single cells is in ``wire_cells``. Columns
that we do not know are tolerated and listed, never kept. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from servoscope.exporters.records import WIRE_FIELDS, RequestRecord
from servoscope.exporters.wire_cells import (
    DEFAULTS,
    MAX_INTEGER,
    MAX_REPORTED,
    MAX_TEXT,
    RefusedCell,
    check_cells,
    record_from_row,
    short,
)

__all__ = [
    "MAX_COLUMNS",
    "MAX_ROWS",
    "MAX_TEXT",
    "REQUIRED_COLUMNS",
    "SCHEMA",
    "Batch",
    "RefusedCell",
    "WireError",
    "decode_batch",
    "encode_batch",
]

SCHEMA = "servoscope.records.v1"
MAX_ROWS = 10_000
MAX_COLUMNS = 256
MAX_SIDECAR_ID = 128  # characters
REQUIRED_COLUMNS: tuple[str, ...] = ("request_id", "source", "outcome")


class WireError(ValueError):
    """A batch that cannot be taken at all. ``field`` names the part at fault, ``why`` the fault."""

    def __init__(self, field_name: str, why: str) -> None:
        super().__init__(f"{field_name}: {why}")
        self.field = field_name
        self.why = why


@dataclass(kw_only=True)
class Batch:
    """A decoded batch: the rows that were kept, and what was not.

    ``columns`` holds every wire field, all of one length, values valid. The first few refusals are
    described in ``refused``; ``refused_rows`` (rows lost) and ``refused_values`` (measurements
    replaced by ``None``) count them all.
    """

    sidecar_id: str
    epoch: int
    seq: int
    columns: dict[str, list[Any]]
    refused: list[RefusedCell] = field(default_factory=list)
    refused_rows: int = 0
    refused_values: int = 0
    unknown_columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.columns["request_id"])

    @property
    def key(self) -> tuple[str, int, int]:
        """The idempotency key."""
        return (self.sidecar_id, self.epoch, self.seq)

    @cached_property
    def records(self) -> list[RequestRecord]:
        """The kept rows as records (built on first use)."""
        rows = zip(*(self.columns[name] for name in WIRE_FIELDS), strict=True)
        return [record_from_row(row) for row in rows]


def encode_batch(
    records: Sequence[RequestRecord], *, sidecar_id: str, epoch: int, seq: int
) -> dict[str, Any]:
    """Records as one batch, ready for any JSON encoder.

    Numbers that are not finite become ``None`` (JSON has no word for them) and over-long texts are
    cut to ``MAX_TEXT``. Raises WireError above ``MAX_ROWS``: the caller chooses the batch size.
    """
    if len(records) > MAX_ROWS:
        raise WireError("columns", f"{len(records)} rows, at most {MAX_ROWS}")
    columns: dict[str, list[Any]] = {}
    for name in WIRE_FIELDS:
        values = [_plain(getattr(record, name)) for record in records]
        default = DEFAULTS[name]
        if name in REQUIRED_COLUMNS or any(value != default for value in values):
            columns[name] = values
    return {
        "schema": SCHEMA,
        "sidecar_id": sidecar_id,
        "epoch": epoch,
        "seq": seq,
        "columns": columns,
    }


def decode_batch(obj: object, *, now: float = math.inf) -> Batch:
    """Check a parsed batch and return what can be believed of it.

    ``now`` (unix seconds) bounds times; without it no time counts as in the future. Raises
    WireError naming the field when the envelope itself is wrong: another schema, no key, a
    missing required column, columns of unlike length, too many rows.
    """
    if not isinstance(obj, Mapping):
        raise WireError("body", f"expected an object, got {type(obj).__name__}")
    if obj.get("schema") != SCHEMA:
        raise WireError("schema", f"expected {SCHEMA!r}, got {short(obj.get('schema'))}")
    sidecar_id = obj.get("sidecar_id")
    if not isinstance(sidecar_id, str) or not 0 < len(sidecar_id) <= MAX_SIDECAR_ID:
        raise WireError("sidecar_id", f"expected a text of 1..{MAX_SIDECAR_ID} characters")
    if not sidecar_id.isprintable():
        raise WireError("sidecar_id", "holds characters that cannot be printed")
    epoch, seq = _key_part(obj, "epoch"), _key_part(obj, "seq")
    columns, unknown = _columns(obj.get("columns"))
    cells = check_cells(columns, now)
    return Batch(
        sidecar_id=sidecar_id,
        epoch=epoch,
        seq=seq,
        columns=cells.columns,
        refused=cells.refused,
        refused_rows=cells.refused_rows,
        refused_values=cells.refused_values,
        unknown_columns=unknown,
    )


def _key_part(obj: Mapping[Any, Any], name: str) -> int:
    value = obj.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise WireError(name, f"expected a whole number 0..2^63-1, got {short(value)}")
    return value


def _columns(given: object) -> tuple[dict[str, list[Any]], tuple[str, ...]]:
    """Every wire field as a list of one length, and the names of columns that we do not know."""
    if not isinstance(given, Mapping):
        raise WireError("columns", f"expected an object, got {type(given).__name__}")
    if len(given) > MAX_COLUMNS:
        raise WireError("columns", f"{len(given)} columns, at most {MAX_COLUMNS}")
    for name in REQUIRED_COLUMNS:
        if name not in given:
            raise WireError(f"columns.{name}", "missing")
    rows: int | None = None
    columns: dict[str, list[Any]] = {}
    for name in WIRE_FIELDS:
        if name not in given:
            continue
        values = given[name]
        if not isinstance(values, list):
            raise WireError(f"columns.{name}", f"expected a list, got {type(values).__name__}")
        rows = len(values) if rows is None else rows
        if len(values) != rows:
            raise WireError(f"columns.{name}", f"{len(values)} values where others have {rows}")
        if rows > MAX_ROWS:
            raise WireError(f"columns.{name}", f"{rows} rows, at most {MAX_ROWS}")
        columns[name] = list(values)  # cells are replaced later: the caller's object stays his
    for name in WIRE_FIELDS:
        if name not in columns:
            columns[name] = [DEFAULTS[name]] * (rows or 0)
    unknown = [str(name)[:MAX_TEXT] for name in given if name not in DEFAULTS]
    return columns, tuple(unknown[:MAX_REPORTED])


def _plain(value: Any) -> Any:
    """A value as JSON can carry it."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        cut = value[:MAX_TEXT].replace("\0", "")
        return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()
    return value

"""A batch as rows of the store's tables: arrays for DuckDB, and the statements that take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from servoscope.collector.lengths import EDGES
from servoscope.exporters.records import WIRE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from servoscope.collector.slo import Judgement
    from servoscope.exporters.wire import Batch

__all__ = [
    "Arrival",
    "accepted_before",
    "add_keys",
    "add_verdicts",
    "arrays",
    "buckets",
    "insert_statement",
    "see_sidecars",
]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch that came in, and what its records count for."""

    batch: Batch
    judgement: Judgement


def insert_statement(db: duckdb.DuckDBPyConnection) -> tuple[str, dict[str, str]]:
    """The INSERT from the registered arrays, and the SQL type of each column of ``requests``."""
    types = {str(r[0]): str(r[1]) for r in db.execute("DESCRIBE requests").fetchall()}
    # Arrays of numbers say "not known" as NaN (numpy has no NULL); SQL says it as NULL again.
    values = [
        f"nullif({name}, 'nan'::DOUBLE)::{kind}" if _is_number(kind) else f"{name}::{kind}"
        for name, kind in types.items()
    ]
    names = ", ".join(types)
    sql = f"INSERT INTO requests ({names}) SELECT {', '.join(values)} FROM incoming"  # noqa: S608
    return sql, types


def _is_number(kind: str) -> bool:
    return kind in ("DOUBLE", "BIGINT", "INTEGER")


def arrays(
    arrivals: Sequence[Arrival], types: Mapping[str, str], now: float
) -> dict[str, np.ndarray[Any, Any]]:
    """Batches, one after the other, as one array a column of the table."""
    parts = [arrival.batch.columns for arrival in arrivals]
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name in WIRE_FIELDS:
        values = [value for columns in parts for value in columns[name]]
        if name in ("source", "outcome", "phase"):
            values = [member.value for member in values]
        made[name] = np.array(values, dtype=np.float64 if _is_number(types[name]) else object)
    finished = made["finished_unix_seconds"]
    made["at_unix_seconds"] = np.where(np.isnan(finished), now, finished)
    made["sidecar_id"] = np.array(
        [a.batch.sidecar_id for a in arrivals for _ in range(len(a.batch))], dtype=object
    )
    made["meets_all"] = np.array([met for a in arrivals for met in a.judgement.meets], dtype=object)
    made["input_bucket"] = buckets(made["prompt_tokens"])
    made["output_bucket"] = buckets(made["output_tokens"])
    return made


def buckets(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``lengths.bucket_of`` for a whole column; NaN stays NaN."""
    found = np.maximum(np.searchsorted(EDGES, tokens, side="right") - 1, 0)
    return np.where(np.isnan(tokens), np.nan, found)


def add_keys(
    db: duckdb.DuckDBPyConnection, batches: Sequence[Batch], now: float
) -> set[tuple[str, int, int]]:
    """Add the keys that are not stored yet and return them. The keys given must differ."""
    rows = [(*batch.key, len(batch)) for batch in batches]
    added = db.execute(
        "INSERT INTO batches SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[]), "
        "unnest(?::BIGINT[]), unnest(?::BIGINT[]), ?::DOUBLE "
        "ON CONFLICT DO NOTHING RETURNING sidecar_id, epoch, seq",
        [*_columns(rows), now],
    ).fetchall()
    return {(sidecar_id, epoch, seq) for sidecar_id, epoch, seq in added}


def accepted_before(db: duckdb.DuckDBPyConnection, key: tuple[str, int, int]) -> int:
    """How many rows are stored under a key."""
    row = db.execute(
        "SELECT accepted FROM batches WHERE sidecar_id = ? AND epoch = ? AND seq = ?", list(key)
    ).fetchone()
    return int(row[0]) if row else 0


def add_verdicts(db: duckdb.DuckDBPyConnection, judgements: Sequence[Judgement]) -> None:
    """Add counts to the minutes they belong to."""
    sums: dict[tuple[int, str, str], list[int]] = {}
    for judgement in judgements:
        for key, tally in judgement.tallies.items():
            row = sums.setdefault(key, [0, 0, 0, 0])
            counts = (tally.good, tally.total, tally.over, tally.censored)
            for i, value in enumerate(counts):
                row[i] += value
    if not sums:
        return
    db.execute(
        "INSERT INTO verdicts SELECT unnest(?::BIGINT[]), unnest(?::VARCHAR[]), "
        "unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::BIGINT[]), unnest(?::BIGINT[]), "
        "unnest(?::BIGINT[]) "
        "ON CONFLICT DO UPDATE SET good = good + excluded.good, total = total + excluded.total, "
        "over = over + excluded.over, censored = censored + excluded.censored",
        _columns([(*key, *row) for key, row in sums.items()]),
    )


def see_sidecars(db: duckdb.DuckDBPyConnection, batches: Sequence[Batch], now: float) -> None:
    """Note that these sidecars were heard of now."""
    seen: dict[str, tuple[str, str, int]] = {}  # server, engine, records
    for batch in batches:
        server, engine, count = seen.get(batch.sidecar_id, ("", "", 0))
        if len(batch):
            server, engine = batch.columns["server"][-1], batch.columns["engine"][-1]
        seen[batch.sidecar_id] = (server, engine, count + len(batch))
    if not seen:
        return
    rows = [(name, server, engine, count) for name, (server, engine, count) in seen.items()]
    db.execute(
        "INSERT INTO sidecars SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), "
        "unnest(?::VARCHAR[]), ?::DOUBLE, unnest(?::BIGINT[]) ON CONFLICT DO UPDATE SET "
        "server = if(excluded.server = '', server, excluded.server), "
        "engine = if(excluded.engine = '', engine, excluded.engine), "
        "last_seen_unix_seconds = excluded.last_seen_unix_seconds, "
        "records = records + excluded.records",
        [*_columns(rows)[:3], now, [row[3] for row in rows]],
    )


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Rows as the lists that ``unnest`` takes: one statement for any number of them."""
    return [list(column) for column in zip(*rows, strict=True)]

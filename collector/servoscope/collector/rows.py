"""A batch as rows of the store's tables: arrays for DuckDB, and the statements that take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from servoscope.collector.lengths import EDGES
from servoscope.exporters.records import WIRE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from servoscope.collector.slo import Tally
    from servoscope.exporters.wire import Batch

__all__ = ["add_verdicts", "arrays", "buckets", "insert_statement", "see_sidecar"]


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
    batch: Batch, types: Mapping[str, str], meets: Sequence[bool | None], now: float
) -> dict[str, np.ndarray[Any, Any]]:
    """The batch as one array a column of the table."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name in WIRE_FIELDS:
        values: Any = batch.columns[name]
        if name in ("source", "outcome", "phase"):
            values = [member.value for member in values]
        number = _is_number(types[name])
        made[name] = np.array(values, dtype=np.float64 if number else object)
    finished = made["finished_unix_seconds"]
    made["at_unix_seconds"] = np.where(np.isnan(finished), now, finished)
    made["sidecar_id"] = np.full(len(batch), batch.sidecar_id, dtype=object)
    made["meets_all"] = np.array(meets, dtype=object)
    made["input_bucket"] = buckets(made["prompt_tokens"])
    made["output_bucket"] = buckets(made["output_tokens"])
    return made


def buckets(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``lengths.bucket_of`` for a whole column; NaN stays NaN."""
    found = np.maximum(np.searchsorted(EDGES, tokens, side="right") - 1, 0)
    return np.where(np.isnan(tokens), np.nan, found)


def add_verdicts(
    db: duckdb.DuckDBPyConnection, tallies: Mapping[tuple[int, str, str], Tally]
) -> None:
    """Add counts to the minutes they belong to."""
    if not tallies:
        return
    rows = [(*key, t.good, t.total, t.over, t.censored) for key, t in tallies.items()]
    # lists and not one mark a value: a batch may spread over ten thousand minutes
    db.execute(
        "INSERT INTO verdicts SELECT unnest(?::BIGINT[]), unnest(?::VARCHAR[]), "
        "unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::BIGINT[]), unnest(?::BIGINT[]), "
        "unnest(?::BIGINT[]) "
        "ON CONFLICT DO UPDATE SET good = good + excluded.good, total = total + excluded.total, "
        "over = over + excluded.over, censored = censored + excluded.censored",
        [list(column) for column in zip(*rows, strict=True)],
    )


def see_sidecar(db: duckdb.DuckDBPyConnection, batch: Batch, now: float) -> None:
    """Note that this sidecar was heard of now."""
    server = batch.columns["server"][-1] if len(batch) else ""
    engine = batch.columns["engine"][-1] if len(batch) else ""
    db.execute(
        "INSERT INTO sidecars VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "server = if(excluded.server = '', server, excluded.server), "
        "engine = if(excluded.engine = '', engine, excluded.engine), "
        "last_seen_unix_seconds = excluded.last_seen_unix_seconds, "
        "records = records + excluded.records",
        [batch.sidecar_id, server, engine, now, len(batch)],
    )

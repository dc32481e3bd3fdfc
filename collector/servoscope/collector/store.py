"""The store: batches in, exactly once; questions out. One process owns the file.

Writing belongs to one thread (``Intake`` has it). Reading is done on cursors of their own, one a
thread, and sees whole batches only (DuckDB is multi-version). Text of prompts and answers cannot
get here: only the columns of ``requests`` are ever written, and none holds any.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from servoscope.collector.database import StoreError, StoreLockedError, open_database
from servoscope.collector.lengths import EDGES
from servoscope.exporters.records import WIRE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from servoscope.collector.slo import Judgement, Tally
    from servoscope.exporters.wire import Batch

__all__ = ["Inserted", "Removed", "Retention", "Store", "StoreError", "StoreLockedError"]

log = logging.getLogger(__name__)
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of a batch. ``accepted`` rows are stored, now or (``duplicate``) before."""

    accepted: int
    duplicate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long and how much is kept."""

    records_seconds: float
    verdicts_seconds: float
    keys_seconds: float
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Rows that retention deleted."""

    by_age: int
    by_size: int


class Store:
    """An open store. Methods raise StoreError; after one the store can still be used."""

    def __init__(
        self, path: Path, *, now: float, memory_limit_mebibytes: int = 768, threads: int = 2
    ) -> None:
        self.path = path
        self._memory_limit_mebibytes = memory_limit_mebibytes
        self._threads = threads
        self._local = threading.local()
        self._lock = threading.Lock()  # guards _generation and _cursors
        self._open(now)

    def _open(self, now: float) -> None:
        self._db = open_database(
            self.path,
            now=now,
            memory_limit_mebibytes=self._memory_limit_mebibytes,
            threads=self._threads,
        )
        self._generation = object()  # readers drop cursors of an earlier opening
        self._cursors: list[duckdb.DuckDBPyConnection] = []  # one a reading thread
        self._insert_sql, self._types = _insert_statement(self._db)

    def close(self) -> None:
        """Write everything to the main file and let go of it."""
        try:
            self._db.execute("CHECKPOINT")
        except duckdb.Error as error:  # everything committed is in the write-ahead log anyway
            log.warning("checkpoint of %s failed: %s", self.path, error)
        self._let_go()

    def _let_go(self) -> None:
        # A database lives on while one cursor of it does, and opening the path gives it back.
        for cursor in self._cursors:
            cursor.interrupt()
            cursor.close()
        self._db.close()

    # ---- writing: one thread -------------------------------------------------------------------

    def insert(self, batch: Batch, judgement: Judgement, now: float) -> Inserted:
        """Store a batch and its key in one transaction, unless the key is stored already."""
        try:
            known = self._db.execute(
                "SELECT accepted FROM batches WHERE sidecar_id = ? AND epoch = ? AND seq = ?",
                list(batch.key),
            ).fetchone()
            if known is not None:
                return Inserted(int(known[0]), duplicate=True)
            incoming = _arrays(batch, self._types, judgement.meets, now) if len(batch) else None
            self._transaction(batch, incoming, judgement.tallies, now)
        except duckdb.Error as error:
            self._recover(error, now)
            raise StoreError(f"cannot store a batch: {_first_line(error)}") from error
        return Inserted(len(batch), duplicate=False)

    def _transaction(
        self,
        batch: Batch,
        incoming: dict[str, np.ndarray[Any, Any]] | None,
        tallies: Mapping[tuple[int, str, str], Tally],
        now: float,
    ) -> None:
        db = self._db
        if incoming is not None:
            db.register("incoming", incoming)
        db.execute("BEGIN TRANSACTION")
        if incoming is not None:
            db.execute(self._insert_sql)
        db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", [*batch.key, len(batch), now])
        _add_verdicts(db, tallies)
        _see_sidecar(db, batch, now)
        db.execute("COMMIT")
        if incoming is not None:
            db.unregister("incoming")

    def retain(self, rule: Retention, now: float) -> Removed:
        """Delete what is too old, and the oldest tenth of the records while the file is too big."""
        try:
            by_age = self._delete("requests", "at_unix_seconds", now - rule.records_seconds)
            self._delete("verdicts", "minute_unix_seconds", now - rule.verdicts_seconds)
            self._delete("batches", "stored_unix_seconds", now - rule.keys_seconds)
            self._delete("sidecars", "last_seen_unix_seconds", now - rule.records_seconds)
            by_size = self._shrink() if self.used_bytes() > rule.max_bytes else 0
            if by_age or by_size:
                self._db.execute("CHECKPOINT")
        except duckdb.Error as error:
            self._recover(error, now)
            raise StoreError(f"cannot delete old records: {_first_line(error)}") from error
        return Removed(by_age=by_age, by_size=by_size)

    def used_bytes(self) -> int:
        """Bytes of the blocks in use. DuckDB uses free blocks again and does not give them back."""
        row = self._db.execute(
            "SELECT sum(used_blocks * block_size)::BIGINT FROM pragma_database_size()"
        ).fetchone()
        return int(row[0] or 0) if row else 0

    def _delete(self, table: str, column: str, before: float) -> int:
        row = self._db.execute(
            f"DELETE FROM {table} WHERE {column} < ?",  # noqa: S608 - our own names
            [before],
        ).fetchone()
        return int(row[0]) if row else 0

    def _shrink(self) -> int:
        row = self._db.execute(
            "SELECT quantile_disc(at_unix_seconds, 0.1) FROM requests"
        ).fetchone()
        if row is None or row[0] is None:
            return 0
        return self._delete("requests", "at_unix_seconds", float(row[0]) + 1e-6)

    def _recover(self, error: duckdb.Error, now: float) -> None:
        """Leave no transaction open; open the file again when DuckDB gave it up."""
        try:
            self._db.execute("ROLLBACK")
        except duckdb.TransactionException:
            return  # there was none
        except duckdb.Error:
            log.exception("the database gave up (%s); opening it again", _first_line(error))
            with self._lock:
                self._let_go()
                self._open(now)

    # ---- reading: any thread -------------------------------------------------------------------

    def read(
        self, sql: str, parameters: Sequence[Any] = (), *, timeout_seconds: float = 20.0
    ) -> list[tuple[Any, ...]]:
        """Rows of a question. Raises StoreError, also when it took too long."""
        cursor = self._cursor()
        alarm = threading.Timer(timeout_seconds, cursor.interrupt)
        alarm.daemon = True
        alarm.start()
        try:
            return cursor.execute(sql, list(parameters)).fetchall()
        except duckdb.InterruptException as error:
            raise StoreError(f"the question took more than {timeout_seconds:g} s") from error
        except duckdb.Error as error:
            raise StoreError(f"cannot read: {_first_line(error)}") from error
        finally:
            alarm.cancel()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if getattr(self._local, "generation", None) is not self._generation:
                self._local.cursor = self._db.cursor()
                self._local.generation = self._generation
                self._cursors.append(self._local.cursor)
        cursor: duckdb.DuckDBPyConnection = self._local.cursor
        return cursor


# ---- SQL of one batch --------------------------------------------------------------------------


def _insert_statement(db: duckdb.DuckDBPyConnection) -> tuple[str, dict[str, str]]:
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


def _arrays(
    batch: Batch, types: Mapping[str, str], meets: Sequence[bool | None], now: float
) -> dict[str, np.ndarray[Any, Any]]:
    """The batch as one array a column of the table."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in WIRE_FIELDS:
        values: Any = batch.columns[name]
        if name in ("source", "outcome", "phase"):
            values = [member.value for member in values]
        number = _is_number(types[name])
        arrays[name] = np.array(values, dtype=np.float64 if number else object)
    finished = arrays["finished_unix_seconds"]
    arrays["at_unix_seconds"] = np.where(np.isnan(finished), now, finished)
    arrays["sidecar_id"] = np.full(len(batch), batch.sidecar_id, dtype=object)
    arrays["meets_all"] = np.array(meets, dtype=object)
    arrays["input_bucket"] = _buckets(arrays["prompt_tokens"])
    arrays["output_bucket"] = _buckets(arrays["output_tokens"])
    return arrays


def _buckets(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``lengths.bucket_of`` for a whole column; NaN stays NaN."""
    found = np.maximum(np.searchsorted(EDGES, tokens, side="right") - 1, 0)
    return np.where(np.isnan(tokens), np.nan, found)


def _add_verdicts(
    db: duckdb.DuckDBPyConnection, tallies: Mapping[tuple[int, str, str], Tally]
) -> None:
    if not tallies:
        return
    rows = [(*key, t.good, t.total, t.over, t.censored) for key, t in tallies.items()]
    marks = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * len(rows))
    db.execute(
        f"INSERT INTO verdicts VALUES {marks} "  # noqa: S608 - only question marks
        "ON CONFLICT DO UPDATE SET good = good + excluded.good, total = total + excluded.total, "
        "over = over + excluded.over, censored = censored + excluded.censored",
        [value for row in rows for value in row],
    )


def _see_sidecar(db: duckdb.DuckDBPyConnection, batch: Batch, now: float) -> None:
    server, engine = (
        batch.columns[name][-1] if len(batch) else "" for name in ("server", "engine")
    )
    db.execute(
        "INSERT INTO sidecars VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "server = if(excluded.server = '', server, excluded.server), "
        "engine = if(excluded.engine = '', engine, excluded.engine), "
        "last_seen_unix_seconds = excluded.last_seen_unix_seconds, "
        "records = records + excluded.records",
        [batch.sidecar_id, server, engine, now, len(batch)],
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__

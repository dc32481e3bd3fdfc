"""The store: batches in, exactly once; questions out. One process owns the file.

Writing belongs to one thread (``Intake`` has it). Reading is done on cursors of their own, one a
thread, and sees whole batches only (DuckDB is multi-version). Text of prompts and answers cannot
get here: only the columns of ``requests`` are ever written, and none holds any.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from servoscope.collector.clock import MAX_AHEAD_SECONDS, Span
from servoscope.collector.database import (
    StoreError,
    StoreLockedError,
    first_line,
    has_bad_block,
    move_aside,
    open_database,
)
from servoscope.collector.rows import (
    Arrival,
    accepted_before,
    add_keys,
    add_verdicts,
    arrays,
    insert_statement,
    see_sidecars,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Arrival", "Inserted", "Removed", "Retention", "Store", "StoreError", "StoreLockedError"]

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
    by_future: int  # their time lies ahead: they came while a clock was wrong
    by_size: int


class Store:
    """An open store. Methods raise StoreError; after one the store can still be used."""

    def __init__(
        self, path: Path, *, now: float, memory_limit_mebibytes: int = 768, threads: int = 2
    ) -> None:
        self.path = path
        self._memory_limit_mebibytes = memory_limit_mebibytes
        self._threads = threads
        self._bad_block: duckdb.Error | None = None  # found by a reader; the writer acts on it
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
        self._insert_sql, self._types = insert_statement(self._db)

    def close(self) -> None:
        """Write everything to the main file and let go of it."""
        try:
            self._db.execute("CHECKPOINT")
        except duckdb.Error as error:  # everything committed is in the write-ahead log anyway
            log.warning("checkpoint of %s failed: %s", self.path, error)
        self._let_go()

    def _let_go(self) -> None:
        # A database lives on while one cursor of it does, and opening the path gives it back.
        for connection in (*self._cursors, self._db):
            with suppress(duckdb.ConnectionException):  # closed already
                connection.interrupt()
                connection.close()

    # ---- writing: one thread -------------------------------------------------------------------

    def insert(self, arrivals: Sequence[Arrival], now: float) -> list[Inserted]:
        """Store batches and their keys in one transaction; keys that are stored already stay out.

        Many at once because a transaction costs as much as some thousand rows. Raises StoreError,
        and then none of them is stored.
        """
        if not arrivals:
            return []
        self._replace_bad_file(now)
        try:
            return self._transaction(arrivals, now)
        except duckdb.Error as error:
            self._recover(error, now)
            raise StoreError(f"cannot store a batch: {first_line(error)}") from error

    def _transaction(self, arrivals: Sequence[Arrival], now: float) -> list[Inserted]:
        db = self._db
        by_key = {arrival.batch.key: arrival for arrival in reversed(arrivals)}
        db.execute("BEGIN TRANSACTION")
        added = add_keys(db, [arrival.batch for arrival in by_key.values()], now)
        new = [arrival for key, arrival in by_key.items() if key in added]
        filled = [arrival for arrival in new if len(arrival.batch)]
        if filled:
            db.register("incoming", arrays(filled, self._types, now))
            db.execute(self._insert_sql)
            db.unregister("incoming")
        add_verdicts(db, [arrival.judgement for arrival in new])
        see_sidecars(db, [arrival.batch for arrival in new], now)
        answers = []
        for arrival in arrivals:
            key = arrival.batch.key
            duplicate = key not in added
            added.discard(key)  # a twin in the same call is a duplicate
            accepted = accepted_before(db, key) if duplicate else len(arrival.batch)
            answers.append(Inserted(accepted, duplicate))
        db.execute("COMMIT")
        return answers

    def retain(self, rule: Retention, now: Span) -> Removed:
        """Delete what is too old, what lies ahead, and while the file is too big the oldest tenth.

        What lies ahead would outlive everything, and the good records would go for its size.
        """
        self._replace_bad_file(now.earliest)
        kept_seconds = {
            ("verdicts", "minute_unix_seconds"): rule.verdicts_seconds,
            ("batches", "stored_unix_seconds"): rule.keys_seconds,
            ("sidecars", "last_seen_unix_seconds"): rule.records_seconds,
        }
        ahead = now.latest + MAX_AHEAD_SECONDS
        try:
            by_age = self._delete(
                "requests", "at_unix_seconds", now.earliest - rule.records_seconds
            )
            by_future = self._delete("requests", "at_unix_seconds", ahead, above=True)
            for (table, column), seconds in kept_seconds.items():
                self._delete(table, column, now.earliest - seconds)
                self._delete(table, column, ahead, above=True)
            by_size = self._shrink() if self.used_bytes() > rule.max_bytes else 0
            if by_age or by_future or by_size:
                self._db.execute("CHECKPOINT")
        except duckdb.Error as error:
            self._recover(error, now.earliest)
            raise StoreError(f"cannot delete old records: {first_line(error)}") from error
        return Removed(by_age=by_age, by_future=by_future, by_size=by_size)

    def newest_unix_seconds(self) -> float | None:
        """The wall clock when the newest batch was stored. Raises StoreError."""
        try:
            row = self._db.execute("SELECT max(last_seen_unix_seconds) FROM sidecars").fetchone()
        except duckdb.Error as error:
            raise StoreError(f"cannot read: {first_line(error)}") from error
        return None if row is None or row[0] is None else float(row[0])

    def used_bytes(self) -> int:
        """Bytes of the blocks in use. DuckDB uses free blocks again and does not give them back."""
        row = self._db.execute(
            "SELECT sum(used_blocks * block_size)::BIGINT FROM pragma_database_size()"
        ).fetchone()
        return int(row[0] or 0) if row else 0

    def _delete(self, table: str, column: str, bound: float, *, above: bool = False) -> int:
        sign = ">" if above else "<"
        row = self._db.execute(
            f"DELETE FROM {table} WHERE {column} {sign} ?",  # noqa: S608 - our own names
            [bound],
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
            pass  # there was none
        except duckdb.Error:
            log.exception("the database gave up (%s); opening it again", first_line(error))
            self._reopen(now)
        if has_bad_block(error):
            self._bad_block = error
            self._replace_bad_file(now)

    def _reopen(self, now: float) -> None:
        with self._lock:
            self._let_go()
            self._open(now)

    def _replace_bad_file(self, now: float) -> None:
        """Go on with an empty file once a block was found that cannot be read."""
        error, self._bad_block = self._bad_block, None
        if error is not None:
            with self._lock:
                self._let_go()
                move_aside(self.path, error, now)
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
            if has_bad_block(error):
                self._bad_block = error
            raise StoreError(f"cannot read: {first_line(error)}") from error
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

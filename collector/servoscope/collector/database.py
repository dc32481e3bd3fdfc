"""Opening the DuckDB file: one owner, migrated to today's schema, a damaged file moved aside.

A collector that meets a damaged file starts with an empty one and says where the old one is: a
crash loop would lose every record that comes from then on. Nothing is ever deleted here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from servoscope.collector.migrations import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servoscope.collector.migrations import Migration

__all__ = [
    "StoreError",
    "StoreLockedError",
    "first_line",
    "has_bad_block",
    "move_aside",
    "open_database",
]

log = logging.getLogger(__name__)

#: Parts of DuckDB's messages that mean "these bytes are no database", found by damaging real files.
_DAMAGE = (
    "not a valid DuckDB database file",
    "Could not read enough bytes",
    "Corrupt database file",
    "Failure while replaying WAL",
    "does not match stored checksum",
    "Failed to deserialize",
    "Failed to load metadata",
)
_DAMAGE_KINDS: tuple[type[duckdb.Error], ...] = (
    duckdb.InternalException,
    duckdb.SerializationException,
    duckdb.FatalException,
)


class StoreError(Exception):
    """The store cannot be used; the text says why and what to do."""


class StoreLockedError(StoreError):
    """Another process owns the file."""


def has_bad_block(error: duckdb.Error) -> bool:
    """Whether ``error`` says that a block of the open file does not have its checksum.

    Blocks are read when they are needed, so this can come long after the file was opened.
    """
    return "does not match stored checksum" in str(error)


def first_line(error: Exception) -> str:
    """What an error says, bounded, for messages of one line."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def open_database(
    path: Path,
    *,
    now: float,
    memory_limit_mebibytes: int = 768,
    threads: int = 2,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> duckdb.DuckDBPyConnection:
    """Open or make the file and bring its schema up to date.

    Raises StoreLockedError when another process has it, StoreError when it cannot be opened for a
    reason that moving it would not cure (rights, disk, a newer version).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"database: cannot make {path.parent}: {error}") from error
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": threads,
        "memory_limit": f"{memory_limit_mebibytes}MiB",
        # Text from outside only ever reaches SQL as a value; these close the doors behind that.
        "enable_external_access": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
    }
    for _ in range(3):  # as it is; without a damaged log; afresh
        try:
            connection = _connect(path, settings, migrations, now)
        except duckdb.Error as error:
            _classify(path, error)
            move_aside(path, error, now)
        else:
            path.chmod(0o600)
            return connection
    raise StoreError(f"database: {path} cannot be opened although it was made afresh")


def _connect(
    path: Path,
    settings: dict[str, str | bool | int | float | list[str]],
    migrations: Sequence[Migration],
    now: float,
) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(path), config=settings)
    try:
        connection.execute("SET lock_configuration = true")
        _migrate(connection, path, migrations, now)
    except BaseException:
        connection.close()
        raise
    return connection


def _classify(path: Path, error: duckdb.Error) -> None:
    """Raise unless ``error`` says that the file is damaged."""
    text = str(error)
    if "Could not set lock" in text or "Conflicting lock" in text:
        holder = text.partition("(PID ")[2].partition(")")[0]
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreLockedError(
            f"database: {path} is in use by {who}; one collector owns a file. "
            "Stop that one, or give this one another --database"
        ) from error
    damaged = isinstance(error, _DAMAGE_KINDS) or any(part in text for part in _DAMAGE)
    if not damaged:
        raise StoreError(f"database: cannot open {path}: {first_line(error)}") from error


def move_aside(path: Path, error: duckdb.Error, now: float) -> None:
    """Rename what is damaged: the write-ahead log alone when only that is, else both files.

    Nothing may have the file open. Raises StoreError when it cannot be renamed.
    """
    wal = path.with_name(path.name + ".wal")
    only_wal = "WAL" in str(error) and wal.exists()
    for damaged in (wal,) if only_wal else (wal, path):
        if not damaged.exists():
            continue
        target = _free_name(damaged, now)
        try:
            damaged.rename(target)
        except OSError as failure:
            raise StoreError(
                f"database: {damaged} is damaged and cannot be moved aside: {failure}"
            ) from failure
        log.error(
            "%s is damaged (%s); moved to %s, and going on without it",
            damaged,
            first_line(error),
            target,
        )


def _free_name(path: Path, now: float) -> Path:
    for attempt in range(1000):
        suffix = f".damaged-{int(now)}" + (f"-{attempt}" if attempt else "")
        target = path.with_name(path.name + suffix)
        if not target.exists():
            return target
    raise StoreError(f"database: {path} was moved aside 1000 times in one second")


def _migrate(
    connection: duckdb.DuckDBPyConnection,
    path: Path,
    migrations: Sequence[Migration],
    now: float,
) -> None:
    """Apply each missing step in a transaction of its own."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(version INTEGER PRIMARY KEY, name VARCHAR NOT NULL, applied_unix_seconds DOUBLE NOT NULL)"
    )
    row = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    found, newest = int(row[0]) if row else 0, migrations[-1].version
    if found > newest:
        raise StoreError(
            f"database: {path} has schema {found}, this version knows {newest}; it was "
            "written by a newer Servoscope: upgrade, or give this one another --database"
        )
    for step in migrations:
        if step.version <= found:
            continue
        connection.execute("BEGIN TRANSACTION")
        try:
            for statement in step.statements:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO migrations VALUES (?, ?, ?)", [step.version, step.name, now]
            )
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

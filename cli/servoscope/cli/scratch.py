"""What a run of ``up`` takes for itself: a free port, a database that starts empty."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from servoscope.exporters.paths import private_directory, state_dir

__all__ = ["StackError", "empty_database", "free_port"]

PORTS_TRIED = 100
HIGHEST_PORT = 65_535


class StackError(Exception):
    """A part did not start; the text says which, why, and where its log is."""


@contextlib.contextmanager
def empty_database() -> Iterator[Path]:
    """A database file that is not there yet, in use by nobody, and gone afterwards."""
    folder = private_directory(state_dir() / "embedded")
    path = folder / "collector.duckdb"
    lock = os.open(folder / "collector.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another embedded `up` has that one
            path = folder / f"collector-{os.getpid()}.duckdb"
        _remove_database(path)
        yield path
        _remove_database(path)
    finally:
        os.close(lock)


def _remove_database(path: Path) -> None:
    for file in (path, path.with_name(path.name + ".wal")):
        file.unlink(missing_ok=True)


def free_port(host: str, first: int) -> int:
    """The first port from ``first`` that can be bound; 0: any. Raises StackError."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, min(first + PORTS_TRIED, HIGHEST_PORT + 1)):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError(f"no free port on {host} from {first} to {first + PORTS_TRIED - 1}")

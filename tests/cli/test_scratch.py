"""Ports and the empty database of a run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from servoscope.cli.scratch import StackError, empty_database, free_port


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) != port
    assert free_port("127.0.0.1", 0) > 0
    with pytest.raises(StackError, match="no free port"):
        free_port("127.0.0.1", 65_536)


def test_the_database_starts_empty_is_one_users_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVOSCOPE_STATE", str(tmp_path))
    folder = tmp_path / "embedded"
    folder.mkdir()
    for name in ("collector.duckdb", "collector.duckdb.wal"):
        (folder / name).write_text("old")
    with empty_database() as first:
        assert first == folder / "collector.duckdb"
        assert not list(folder.glob("*.duckdb*"))
        first.write_text("new")
        with empty_database() as second:  # another embedded `up` at the same time
            assert second != first
            second.write_text("new")
        assert first.exists()
        assert not second.exists()
    assert not list(folder.glob("*.duckdb*"))

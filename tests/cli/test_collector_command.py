"""The collector command: what it stores is its user's alone, in whatever directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import duckdb
import pytest

from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.exporters.wire import encode_batch


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def post(port: int, body: bytes) -> int:
    url = f"http://127.0.0.1:{port}/api/v1/records"
    call = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=10) as answer:
        status: int = answer.status
        return status


def test_database_and_its_log_are_readable_by_their_user_only(tmp_path: Path) -> None:
    port, database = free_port(), tmp_path / "shared" / "c.duckdb"
    database.parent.mkdir()
    words = ["collector", "--port", str(port), "--database", str(database)]
    process = subprocess.Popen(
        [sys.executable, "-m", "servoscope.cli.main", *words],
        env={**os.environ, "SERVOSCOPE_STATE": str(tmp_path / "state")},
        umask=0o022,
    )
    try:
        record = RequestRecord(request_id="r", source=Source.RELAY, outcome=Outcome.COMPLETED)
        body = json.dumps(encode_batch([record], sidecar_id="s", epoch=1, seq=1)).encode()
        deadline = time.monotonic() + 30
        while True:
            try:
                assert post(port, body) == 200
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        files = list(database.parent.iterdir())
        assert {f.name for f in files} >= {"c.duckdb", "c.duckdb.wal"}
        assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    finally:
        process.terminate()
        assert process.wait(60) == 0
    with duckdb.connect(str(database), read_only=True) as stored:
        assert stored.execute("SELECT request_id FROM requests").fetchall() == [("r",)]
    assert not database.with_name("c.duckdb.wal").exists()  # all is in the file itself


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    words = ["collector", "--port", str(port), "--database", str(tmp_path / "c.duckdb")]
    process = subprocess.Popen(
        [sys.executable, "-m", "servoscope.cli.main", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SERVOSCOPE_STATE": str(tmp_path / "state")},
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "Traceback" not in said

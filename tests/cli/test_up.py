"""`servoscope up` with no engine: the real llama.cpp server, live rows, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine


def _start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "SERVOSCOPE_STATE": str(tmp_path / "state"),
        "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
        "SERVOSCOPE_COLLECTOR__PORT": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "servoscope.cli.main", "up", "--embedded", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=tmp_path,
    )


def _descendants(pid: int) -> set[int]:
    return {p.pid for p in psutil.Process(pid).children(recursive=True)}


def test_rows_for_three_request_types_and_a_clean_end(tmp_path: Path) -> None:
    process = _start(tmp_path)
    try:
        deadline = time.monotonic() + 200  # of waiting: a slow machine is no fault
        types: set[str] = set()
        while len(types) < 3 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(1)
            types = _types(tmp_path)
        pids = _descendants(process.pid)
        databases = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.duckdb"))
        targets = json.loads((tmp_path / "state" / "prometheus-targets.json").read_text())
        sidecar = targets[0]["targets"][0]
        with urllib.request.urlopen(f"http://{sidecar}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    finally:
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert len(types) >= 3, text
    assert 'source="relay"' in metrics
    assert re.search(r"^servoscope_requests_total\{", metrics, re.MULTILINE)
    assert len(pids) >= 3  # collector, sidecar, engine
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "processes were left behind"
    assert process.returncode == 0, text
    assert "/metrics" in text
    assert "embedded engine, as asked" in text
    assert "no LLM server" not in text
    assert databases == [Path("state/embedded/collector.duckdb")]  # apart from real figures
    assert not list(tmp_path.rglob("*.duckdb"))


def _types(tmp_path: Path) -> set[str]:
    """Request types that the collector of this `up` has rows for."""
    try:
        targets = json.loads((tmp_path / "state" / "prometheus-targets.json").read_text())
        collector = targets[-1]["targets"][0]
        url = f"http://{collector}/api/v1/overview?window_seconds=300"
        with urllib.request.urlopen(url, timeout=5) as answer:
            rows = json.load(answer)["rows"]
    except (OSError, ValueError):
        return set()
    return {row["request_type"] for row in rows if row["requests"] > 0}


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "SERVOSCOPE_STATE": str(tmp_path / "state"),
        "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
        "SERVOSCOPE_COLLECTOR__PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "servoscope.cli.main", "up", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr

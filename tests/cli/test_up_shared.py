"""Two at once: what one `servoscope up` takes from another must not end with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest


class _Engine(BaseHTTPRequestHandler):
    """As much of vLLM as attaching and scraping need."""

    def do_GET(self) -> None:
        body = {
            "/version": b'{"version": "0.32.0"}',
            "/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
            "/metrics": b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n',
        }.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/policy", timeout=2) as answer:
            return "slo_digest" in json.load(answer)
    except (OSError, ValueError):
        return False


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_collector_that_ends_is_replaced_and_the_targets_of_others_stay(
    tmp_path: Path, engine: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "SERVOSCOPE_STATE": str(tmp_path / "state"),
        "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
        "SERVOSCOPE_COLLECTOR__PORT": str(port),
        "SERVOSCOPE_SIDECAR__TAP": "'off'",  # YAML: a word, not false
    }
    command = [sys.executable, "-m", "servoscope.cli.main"]
    url, targets = f"http://127.0.0.1:{port}", tmp_path / "state" / "prometheus-targets.json"

    def start(*words: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{words[0]}.out").open("wb") as out:
            return subprocess.Popen(
                [*command, *words], stdout=out, stderr=out, env=environment, cwd=tmp_path
            )

    def said() -> str:
        return (tmp_path / "up.out").read_text()

    collector = start("collector")
    up = None
    try:
        _until(lambda: _answers(url), "no collector")
        up = start("up", f"http://{engine}")
        _until(targets.exists, "no targets")
        collector.terminate()
        assert collector.wait(120) == 0
        # not before it knows that it has taken over is its end its collector's end
        _until(lambda: "this is one of our own" in said(), "the collector was not replaced")
        assert _answers(url)
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            groups = json.loads(targets.read_text())
            assert [g["targets"] for g in groups][-1] == [f"127.0.0.1:{port}"]
            groups.append({"targets": [address], "labels": {"job": "servoscope-collector"}})
            targets.write_text(json.dumps(groups))
            up.send_signal(signal.SIGINT)
            up.wait(120)
            left = json.loads(targets.read_text())
        assert [g["targets"] for g in left] == [[address]]
    finally:
        for process in (collector, up):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(120)
    assert up.returncode == 0, said()
    assert said().count("metrics    ") == 1
    assert not _answers(url)

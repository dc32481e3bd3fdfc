"""The sidecar command: every way of not starting is a line that says what to do, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest


class _Engine(BaseHTTPRequestHandler):
    """As much of vLLM as attaching needs."""

    def do_GET(self) -> None:
        body = {"/version": b'{"version": "0.32.0"}', "/v1/models": b'{"data": []}'}.get(self.path)
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
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def engine_twice() -> Iterator[int]:
    """One process that listens on both loopback addresses, as a server on `localhost` does."""

    class Six(ThreadingHTTPServer):
        address_family = socket.AF_INET6

    four = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    six = Six(("::1", four.server_address[1]), _Engine)
    threads = [Thread(target=server.serve_forever) for server in (four, six)]
    for thread in threads:
        thread.start()
    yield four.server_address[1]
    for server, thread in zip((four, six), threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_by_another_of_its_names_has_a_sidecar_already(
    tmp_path: Path, engine_twice: int
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-m", "servoscope.cli.main", "sidecar", f"http://[::1]:{engine_twice}",
         "--tap", "off", "--collector", "off"],
        env={
            "SERVOSCOPE_STATE": str(tmp_path / "state"),
            "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
        },
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "run").glob("sidecars/*.json")):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        names = [p.name for p in (tmp_path / "run" / "sidecars").glob("*.json")]
        assert names == [f"127.0.0.1:{engine_twice}.json"]
        for url in (f"http://localhost:{engine_twice}", f"127.0.0.1:{engine_twice}"):
            assert "has a sidecar already" in failing(tmp_path, url)
    finally:
        first.terminate()
        assert first.wait(120) == 0


def failing(tmp_path: Path, *words: str, **places: str) -> str:
    """What the command says on its way out, started as ``servoscope up`` starts it."""
    environment = {
        "SERVOSCOPE_STATE": str(tmp_path / "state"),
        "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
        **places,
    }
    done = subprocess.run(
        [sys.executable, "-m", "servoscope.cli.main", "sidecar", *words, "--tap", "off"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("servoscope sidecar: ")
    return done.stderr


def test_nothing_to_attach_to(tmp_path: Path) -> None:
    assert "Is the engine up?" in failing(tmp_path, "http://127.0.0.1:1")


def test_no_free_port(tmp_path: Path, engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = failing(tmp_path, engine, "--port", port, SERVOSCOPE_SIDECAR__PORT_ATTEMPTS="1")
    assert f"no free port from {port}" in said


def test_a_state_directory_that_cannot_be_made(tmp_path: Path, engine: str) -> None:
    (tmp_path / "file").touch()
    said = failing(tmp_path, engine, SERVOSCOPE_STATE=str(tmp_path / "file" / "state"))
    assert str(tmp_path / "file" / "state" / "token") in said


def test_a_token_that_others_can_read(tmp_path: Path, engine: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text("x\n")
    (tmp_path / "state" / "token").chmod(0o644)
    assert "chmod 600" in failing(tmp_path, engine)


def test_a_runtime_directory_that_everybody_can_write(tmp_path: Path, engine: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    assert "chmod o-w" in failing(tmp_path, engine)

"""The knobs command: arguments, table, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from servoscope.cli import main
from servoscope.cli.commands import knobs
from servoscope.cli.servers import server_of
from servoscope.exporters.cpu import process_stat


class _Api(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None, Any]] = []
    status = 200
    answer: dict[str, Any] | None = None  # instead of one live knob

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        knob = {
            "name": "chunk_tokens", "value": 256, "boot_value": 2048, "minimum": 64,
            "maximum": 2048, "mode": "live", "why": "",
        }  # fmt: skip
        data: dict[str, Any] = {"knobs": [knob]}
        if body and "set" in body:
            data["applied"] = body["set"]
        if self.status != 200:
            data = {"error": "chunk_tokens: 9 is below 64"}
        text = json.dumps(data if self.answer is None else self.answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = _answer
    do_POST = _answer

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _Api.seen, _Api.status, _Api.answer = [], 200, None
    folder = tmp_path / "sidecars"
    folder.mkdir()
    token = tmp_path / "token"
    token.write_text("secret\n")
    port = server.server_address[1]
    (folder / "127.0.0.1_8000.json").write_text(
        json.dumps(
            {"pid": os.getpid(), "port": port, "url": f"http://127.0.0.1:{port}",
             "server": "127.0.0.1:8000", "token_path": str(token),
             "start_seconds": process_stat(os.getpid()).start_seconds}
        )
    )  # fmt: skip
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path))
    yield _Api
    server.shutdown()
    server.server_close()
    thread.join()


def _run(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    return main.main(argv, out), out.getvalue()


def test_get_prints_a_table(sidecar: Any) -> None:
    code, text = _run("knobs", "http://localhost:8000", "get")
    assert code == 0
    assert text.splitlines()[1].split() == ["chunk_tokens", "256", "2048", "64", "2048", "live"]
    assert sidecar.seen[0][:2] == ("/api/v1/knobs", None)


def test_set_sends_token_and_changes(sidecar: Any) -> None:
    code, text = _run("knobs", "http://127.0.0.1:8000", "set", "chunk_tokens=256")
    assert code == 0
    path, authorization, body = sidecar.seen[0]
    assert (path, authorization) == ("/api/v1/knobs", "Bearer secret")
    assert body["set"] == {"chunk_tokens": 256}
    assert text.startswith("applied: chunk_tokens=256\n")


def test_refusal_of_the_engine_is_shown(sidecar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sidecar.status = 400
    code, _ = _run("knobs", "http://127.0.0.1:8000", "set", "chunk_tokens=9")
    assert code == 1
    assert "chunk_tokens: 9 is below 64" in capsys.readouterr().err


def test_no_sidecar_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path))
    code, _ = _run("knobs", "http://127.0.0.1:8000", "get")
    assert code == 1
    assert "servoscope sidecar http://127.0.0.1:8000" in capsys.readouterr().err


def test_a_dead_sidecars_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sidecars"
    folder.mkdir()
    (folder / "127.0.0.1_8000.json").write_text('{"pid": 2147483646, "port": 1}')
    (folder / "127.0.0.1_8001.json").write_text('{"pid": ')
    alive = {"pid": os.getpid(), "port": 1, "server": "127.0.0.1:8000"}  # a pid used again
    (folder / "a.json").write_text(json.dumps(alive))
    (folder / "b.json").write_text(json.dumps({**alive, "start_seconds": 0.25}))
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path))
    assert _run("knobs", "http://127.0.0.1:8000", "get")[0] == 1


@pytest.mark.parametrize("text", ["chunk_tokens", "chunk_tokens=", "=5", "a=b", "a=nan"])
def test_wrong_changes_are_named(text: str) -> None:
    with pytest.raises(main.CommandError, match="NAME=NUMBER"):
        knobs.parse_changes([text])


def test_a_knob_set_twice_is_refused() -> None:
    with pytest.raises(main.CommandError, match="twice"):
        knobs.parse_changes(["a=1", "a=2"])


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://localhost:8000/v1", "127.0.0.1:8000"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://engine", "engine:80"),
        ("https://engine", "engine:443"),
        ("http://[::1]:8000", "[::1]:8000"),  # as the sidecar registers it
    ],
)
def test_server_of(url: str, server: str) -> None:
    assert server_of(url) == server


WHY = "no knob of llamacpp can be set live: it takes its settings at its start; observe only"


def test_get_without_knobs_says_why(sidecar: Any) -> None:
    sidecar.answer = {"knobs": [], "held": False, "why": WHY}
    assert _run("knobs", "http://127.0.0.1:8000", "get") == (0, WHY + "\n")


def test_observed_knobs_are_shown_with_the_reason(sidecar: Any) -> None:
    knob = {"name": "max_num_seqs", "value": 8, "mode": "restart"}
    sidecar.answer = {"knobs": [knob], "held": False, "why": WHY}
    code, text = _run("knobs", "http://127.0.0.1:8000", "get")
    assert code == 0
    assert text.splitlines()[1].split() == ["max_num_seqs", "8", "-", "-", "-", "restart"]
    assert text.splitlines()[2] == WHY


@pytest.mark.parametrize("words", [("release",), ("set", "chunk_tokens=9")])
def test_changes_without_knobs_are_refused(
    sidecar: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    sidecar.status, sidecar.answer = 404, {"error": WHY}
    assert _run("knobs", "http://127.0.0.1:8000", *words)[0] == 1
    assert WHY in capsys.readouterr().err


def test_inspect_shows_the_reason_and_whose_relay_it_is(sidecar: Any) -> None:
    sidecar.answer = {
        "engine": "llamacpp", "version": "b1", "server": "127.0.0.1:8000", "knobs": [],
        "knobs_why": WHY, "relay": "localhost:8001",
    }  # fmt: skip
    code, text = _run("inspect", "http://127.0.0.1:8000")
    assert code == 0
    assert f"knobs      {WHY}" in text.splitlines()
    code, text = _run("inspect", "http://127.0.0.1:8001")
    assert (code, text.splitlines()[0]) == (0, "this is the relay of 127.0.0.1:8000")
    assert "llamacpp b1 at 127.0.0.1:8000" in text


def test_another_engine_than_the_sidecar_holds_is_said(
    sidecar: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.answer = {"engine": "llamacpp", "server": "127.0.0.1:8000"}
    assert _run("inspect", "http://127.0.0.1:8000", "--engine", "vllm")[0] == 1
    assert "holds this engine as llamacpp, not vllm" in capsys.readouterr().err
    assert _run("inspect", "http://127.0.0.1:8000", "--engine", "llamacpp")[0] == 0

"""Provisioning against a small Grafana that checks what it is sent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import pytest

from servoscope.dashboards.generate import rendered_dashboards
from servoscope.dashboards.provision import (
    FOLDER_TITLE,
    FOLDER_UID,
    ProvisionError,
    Pushed,
    push_dashboards,
)

TOKEN = "glsa_test"
ALLOWED_KEYS = {"dashboard", "folderUid", "overwrite", "message"}


class FakeGrafana:
    """A small Grafana on a free loopback port: the few API calls that provisioning makes.

    It refuses what the documented API refuses: a missing or wrong token, a body that is no JSON, a
    folder that exists, a dashboard without title, in an unknown folder, with an id it did not give,
    or with a version that is not its own unless ``overwrite`` is set.
    """

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail_with: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for one request."""
        self.requests.append((method, path))
        if self.fail_with is not None:
            return self.fail_with, {"message": "out of order"}
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        if method == "GET" and path.startswith("/api/folders/"):
            uid = path.removeprefix("/api/folders/")
            if uid not in self.folders:
                return 404, {"message": "folder not found"}
            return 200, {"uid": uid, "title": self.folders[uid]}
        try:
            sent = json.loads(body)
        except ValueError:
            return 400, {"message": "bad request data"}
        if (method, path) == ("POST", "/api/folders"):
            return self._create_folder(sent)
        if (method, path) == ("POST", "/api/dashboards/db"):
            return self._save_dashboard(sent)
        return 404, {"message": "Not found"}

    def _create_folder(self, sent: dict[str, Any]) -> tuple[int, Any]:
        if not sent.get("title"):
            return 400, {"message": "folder title cannot be empty"}
        if sent["uid"] in self.folders:
            return 412, {"message": "a folder with that uid exists"}
        self.folders[sent["uid"]] = sent["title"]
        return 200, {"uid": sent["uid"], "title": sent["title"]}

    def _save_dashboard(self, sent: dict[str, Any]) -> tuple[int, Any]:
        board = sent.get("dashboard")
        if not isinstance(board, dict) or not board.get("title") or set(sent) - ALLOWED_KEYS:
            return 400, {"message": "bad request data"}
        if sent.get("folderUid") not in self.folders:
            return 400, {"message": "folder not found"}
        if board.get("id") is not None:
            return 404, {"message": "Dashboard not found"}
        known = self.dashboards.get(board["uid"])
        if known and not sent.get("overwrite") and board.get("version") != known["version"]:
            return 412, {"status": "version-mismatch", "message": "changed by someone else"}
        version = known["version"] + 1 if known else 1
        self.dashboards[board["uid"]] = {
            "version": version,
            "dashboard": board,
            "folderUid": sent["folderUid"],
        }
        return 200, {
            "id": len(self.dashboards),
            "uid": board["uid"],
            "url": f"/d/{board['uid']}/servoscope-overview",
            "status": "success",
            "version": version,
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = self.headers.get("Authorization", "")
                status, answer = grafana.answer(self.command, self.path, token, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = _serve

            def log_message(self, *args: object) -> None:
                """Quiet: pytest shows what matters."""

        return Handler


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as running:
        yield running


def test_the_first_push_makes_the_folder_and_the_dashboard(grafana: FakeGrafana) -> None:
    pushed = push_dashboards(grafana.url, TOKEN)
    assert pushed == [
        Pushed("servoscope-overview", "/d/servoscope-overview/servoscope-overview", 1)
    ]
    assert grafana.folders == {FOLDER_UID: FOLDER_TITLE}
    kept = grafana.dashboards["servoscope-overview"]
    assert kept["folderUid"] == FOLDER_UID
    assert kept["dashboard"] == json.loads(rendered_dashboards()["overview.json"])


def test_a_second_push_replaces_it_and_leaves_the_folder(grafana: FakeGrafana) -> None:
    push_dashboards(grafana.url, TOKEN)
    (again,) = push_dashboards(grafana.url, TOKEN)
    assert again.version == 2
    assert len(grafana.dashboards) == 1
    assert grafana.requests.count(("POST", "/api/folders")) == 1


def test_an_id_or_version_of_another_installation_is_not_sent(grafana: FakeGrafana) -> None:
    board = {"uid": "u", "title": "T", "id": 17, "version": 4, "panels": []}
    (pushed,) = push_dashboards(grafana.url, TOKEN, dashboards={"t.json": board})
    assert pushed.uid == "u"
    assert grafana.dashboards["u"]["dashboard"] == {"uid": "u", "title": "T", "panels": []}


def test_a_dashboard_without_uid_is_refused_here(grafana: FakeGrafana) -> None:
    with pytest.raises(ProvisionError, match=r"t\.json: no uid"):
        push_dashboards(grafana.url, TOKEN, dashboards={"t.json": {"title": "T"}})
    assert grafana.dashboards == {}


def test_a_wrong_token_is_said(grafana: FakeGrafana) -> None:
    with pytest.raises(ProvisionError, match="Unauthorized"):
        push_dashboards(grafana.url, "wrong")
    assert grafana.folders == {}


def test_what_grafana_refuses_is_said_with_the_file_name(grafana: FakeGrafana) -> None:
    with pytest.raises(ProvisionError, match=r"t\.json: Bad Input"):
        push_dashboards(grafana.url, TOKEN, dashboards={"t.json": {"uid": "u"}})


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_failing_grafana_is_said(grafana: FakeGrafana, status: int) -> None:
    grafana.fail_with = status
    with pytest.raises(ProvisionError, match="out of order"):
        push_dashboards(grafana.url, TOKEN)


def test_no_grafana_is_said() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(ProvisionError, match="folder 'servoscope'"):
        push_dashboards(f"http://127.0.0.1:{port}", TOKEN, timeout_seconds=2.0)

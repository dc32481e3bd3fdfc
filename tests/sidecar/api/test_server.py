"""The sidecar's HTTP: formats, health, the control API's door, the registered file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from servoscope.exporters.cpu import process_stat
from servoscope.exporters.hosts import known_hosts
from servoscope.exporters.records import Knob, KnobMode
from servoscope.sidecar.api import control_api, server
from servoscope.sidecar.api.control_api import ControlApi
from servoscope.sidecar.api.guard import HostGuard
from servoscope.sidecar.control.knobs import ControlError
from servoscope.sidecar.publish.families import Registry

pytestmark = pytest.mark.usefixtures("ended_streams")

KNOB = Knob(
    name="chunk_tokens", mode=KnobMode.LIVE, unit="tokens", value=2048.0, boot_value=2048.0,
    minimum=33.0, maximum=2048.0,
)  # fmt: skip


class FakeControl:
    """As far as the API calls it."""

    held = False
    why = ""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: ControlError | None = None

    async def knobs(self) -> list[Knob]:
        return [KNOB]

    async def set(self, values: dict[str, float], actor: str) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        self.asked.append((values, actor))
        return values

    async def release(self, actor: str) -> None:
        self.asked.append(("release", actor))


class Served:
    """The application at work."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.registry.family("build_info").set(("1",), 1)
        self.control = FakeControl()
        self.not_ready: str | None = "looking"
        self.guard = HostGuard(known_hosts("127.0.0.1", ["metrics.example"], "box.example"))
        self.url = ""

    async def get(self, path: str, **kw: Any) -> tuple[int, str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path, **kw) as answer:
            return answer.status, await answer.text(), answer.headers

    async def post(self, path: str, data: Any, token: str | None = "secret") -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession() as session:
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            async with session.post(self.url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.json()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()

    async def inspect() -> dict[str, Any]:
        return {"engine": "vllm"}

    api: Any = ControlApi(made.control, "secret")  # type: ignore[arg-type]
    app = server.create_app(
        lambda openmetrics: made.registry.render(openmetrics=openmetrics),
        inspect,
        lambda: made.not_ready,
        api,
        made.guard,
    )
    listener = server.bind("127.0.0.1", 0, 1)
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with server.serving(app, listener):
        yield made


async def test_text_is_the_default_and_holds_the_process_too(served: Served) -> None:
    status, text, headers = await served.get("/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {f.name for f in parse_text(text)}
    assert {"servoscope_build_info", "process_resident_memory_bytes", "python_gc_collections"} <= (
        names
    )


async def test_openmetrics_when_asked_for(served: Served) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    status, text, headers = await served.get("/metrics", headers={"Accept": accept})
    assert status == 200
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert text.count("# EOF") == 1
    assert "servoscope_build_info" in {f.name for f in parse_openmetrics(text)}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [("", False), ("*/*", False), ("application/openmetrics-text", True),
     ("text/plain, application/openmetrics-text; version=1.0.0", True),
     ("application/openmetrics-text;q=0", False), (";;,,", False)],
)  # fmt: skip
def test_negotiation(accept: str, expected: bool) -> None:
    assert server.wants_openmetrics(accept) is expected


async def test_health_and_readiness(served: Served) -> None:
    assert (await served.get("/healthz"))[:2] == (200, "ok\n")
    assert (await served.get("/readyz"))[:2] == (503, "looking\n")
    served.not_ready = None
    assert (await served.get("/readyz"))[0] == 200
    assert json.loads((await served.get("/api/v1/inspect"))[1]) == {"engine": "vllm"}


async def test_reading_knobs_needs_no_token_and_changing_does(served: Served) -> None:
    body = json.loads((await served.get("/api/v1/knobs"))[1])
    assert body["knobs"][0]["maximum"] == 2048.0
    for token in (None, "wrong", ""):
        status, answer = await served.post("/api/v1/knobs", {"set": {"a": 1}}, token)
        assert status == 401
        assert "token" in answer["error"]
        assert (await served.post("/api/v1/knobs/release", {}, token))[0] == 401
    assert served.control.asked == []


async def test_set_and_release(served: Served) -> None:
    body = {"set": {"chunk_tokens": 256}, "actor": "ann"}
    status, answer = await served.post("/api/v1/knobs", body)
    assert (status, answer["applied"]) == (200, {"chunk_tokens": 256})
    assert (await served.post("/api/v1/knobs/release", b""))[0] == 200
    assert served.control.asked[0] == ({"chunk_tokens": 256}, "ann")
    assert served.control.asked[1][1].startswith("api 127.0.0.1")


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [(b"{", 400, "JSON"), (b"[1]", 400, "object"), (b"{}", 400, "set"),
     (b'{"set": 5}', 400, "set"), (b"[" * 5000, 400, "JSON"), (b"x" * 20_000, 413, "bytes")],
)  # fmt: skip
async def test_bad_bodies(served: Served, body: bytes, status: int, word: str) -> None:
    found, answer = await served.post("/api/v1/knobs", body)
    assert found == status
    assert word in answer["error"]


async def test_a_body_in_pieces_is_read_whole(served: Served) -> None:
    body = json.dumps({"set": {"chunk_tokens": 256}, "actor": "x" * 3000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(body), 1000):
            yield body[i : i + 1000]
            await asyncio.sleep(0.02)

    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession() as session:
        call = session.post(served.url + "/api/v1/knobs", data=pieces(), headers=headers)
        async with call as answer:
            assert answer.status == 200
    assert served.control.asked[0][0] == {"chunk_tokens": 256}


async def test_a_body_that_never_ends_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_api, "_BODY_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(
        b"POST /api/v1/knobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"408"
    writer.close()


async def test_an_authorization_that_is_no_text_is_a_401(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(
        b"POST /api/v1/knobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"401"
    writer.close()


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/api/v1/inspect", "/nothing"])
async def test_a_page_whose_name_leads_to_us_reads_nothing(served: Served, path: str) -> None:
    served.not_ready = None
    port = served.url.rsplit(":", 1)[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        status, text, _ = await served.get(path, headers={"Host": host})
        assert status == 421
        assert "sidecar.allowed_hosts" in json.loads(text)["error"]
    assert served.guard.refused == 4
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"10.1.2.3:{port}",
                 f"metrics.example:{port}", "METRICS.example"):  # fmt: skip
        assert (await served.get(path, headers={"Host": host}))[0] == (
            404 if path == "/nothing" else 200
        )
    assert served.guard.refused == 4


async def test_nor_does_it_turn_a_knob_even_with_the_token(served: Served) -> None:
    headers = {"Authorization": "Bearer secret", "Host": "evil.example"}
    async with aiohttp.ClientSession() as session:
        for path in ("/api/v1/knobs", "/api/v1/knobs/release"):
            async with session.post(served.url + path, json={}, headers=headers) as answer:
                assert answer.status == 421
    assert served.control.asked == []


@pytest.mark.parametrize("lines", ["", "Host: localhost\r\nHost: evil.example\r\n"])
async def test_no_host_and_two_hosts_are_refused(served: Served, lines: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(f"GET /metrics HTTP/1.1\r\n{lines}\r\n".encode())
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] in (b"421", b"400")
    writer.close()


async def test_errors_of_control_keep_their_status(served: Served) -> None:
    served.control.error = ControlError(409, "held by other")
    found, answer = await served.post("/api/v1/knobs", {"set": {"a": 1}})
    assert (found, answer) == (409, {"error": "held by other"})


def test_the_first_free_port_is_taken() -> None:
    first = server.bind("127.0.0.1", 0, 1)
    port = first.getsockname()[1]
    with first, server.bind("127.0.0.1", port, 50) as second:
        assert second.getsockname()[1] > port
        with pytest.raises(OSError, match="no free port"):
            server.bind("127.0.0.1", port, 1)


def test_the_registered_file_comes_and_goes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with server.registered(tmp_path / "run", "127.0.0.1:8000", 9790, "127.0.0.1", token) as path:
        assert path == tmp_path / "run" / "sidecars" / "127.0.0.1:8000.json"
        entry = json.loads(path.read_text())
        assert entry == {
            "pid": os.getpid(), "port": 9790, "url": "http://127.0.0.1:9790",
            "server": "127.0.0.1:8000", "token_path": str(token),
            "start_seconds": process_stat(os.getpid()).start_seconds,
        }  # fmt: skip
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_the_file_of_a_later_sidecar_is_left(tmp_path: Path) -> None:
    with server.registered(tmp_path, "h:1", 1, "127.0.0.1", tmp_path) as path:
        path.write_text('{"pid": 1}')
    assert path.exists()


def test_a_directory_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with (
        pytest.raises(PermissionError),
        server.registered(tmp_path / "run", "h:1", 1, "127.0.0.1", tmp_path),
    ):
        pass


def test_ipv6() -> None:
    if not socket.has_ipv6:
        return
    with server.bind("::1", 0, 1) as listener:
        assert listener.family is socket.AF_INET6


def test_a_second_sidecar_of_a_server_is_refused(tmp_path: Path) -> None:
    program = "import time; print('on', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            folder = tmp_path / "sidecars"
            folder.mkdir(mode=0o700)
            entry = {
                "pid": other.pid, "port": 9790, "url": "http://127.0.0.1:9790",
                "start_seconds": process_stat(other.pid).start_seconds,
            }  # fmt: skip
            (folder / "h:1.json").write_text(json.dumps(entry))
            with (
                pytest.raises(server.AlreadyAttachedError, match=f"pid {other.pid}"),
                server.registered(tmp_path, "h:1", 1, "127.0.0.1", tmp_path),
            ):
                pass
            assert json.loads((folder / "h:1.json").read_text()) == entry
        finally:
            other.kill()
            other.wait(10)
    with server.registered(tmp_path, "h:1", 1, "127.0.0.1", tmp_path) as path:  # it is gone now
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("kept", [{}, {"start_seconds": 1.5}, {"start_seconds": "x"}])
def test_a_file_whose_pid_is_somebody_else_now_is_taken_over(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    """After kill -9 the pid can come again, and as the id of a thread too."""
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    try:
        folder = tmp_path / "sidecars"
        folder.mkdir(mode=0o700)
        for pid in (thread.native_id, os.getppid()):
            entry = {"pid": pid, "port": 1, "url": "http://127.0.0.1:1", **kept}
            (folder / "h:1.json").write_text(json.dumps(entry))
            with server.registered(tmp_path, "h:1", 1, "127.0.0.1", tmp_path) as path:
                assert json.loads(path.read_text())["pid"] == os.getpid()
    finally:
        idle.set()
        thread.join()


def test_of_many_that_start_together_one_is_registered(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from servoscope.sidecar.api import server\n"
        "run = pathlib.Path(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "try:\n"
        "    with server.registered(run, 'h:1', 1, '127.0.0.1', run):\n"
        "        print('in', flush=True); sys.stdin.readline()\n"
        "except server.AlreadyAttachedError:\n"
        "    print('out', flush=True)\n"
    )
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, str(tmp_path)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for _ in range(4)
        ]  # fmt: skip

        def said() -> list[str]:
            return sorted(one.stdout.readline().strip() for one in started if one.stdout)

        assert said() == ["ready"] * 4
        for one in started:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        assert said() == ["in", "out", "out", "out"]
        for one in started:
            one.communicate("\n", timeout=10)

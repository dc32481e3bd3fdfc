from __future__ import annotations

import os
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from servoscope.exporters.plugin import line_server
from servoscope.exporters.plugin.line_server import MAX_CONNECTIONS, Connection, LineServer
from servoscope.exporters.plugin.lines import encode_line
from servoscope.exporters.plugin.sockets import (
    allowed,
    connect,
    remove_stale,
    sockets_of,
)


class Echo:
    """Says hello, sends every message back, raises when asked to."""

    def __init__(self) -> None:
        self.closes = 0

    def hello(self) -> dict[str, Any]:
        return {"type": "hello"}

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        if message.get("op") == "raise":
            raise KeyError("asked to")
        for _ in range(message.get("times", 1)):
            connection.send({"echo": message})

    def closed(self, connection: Connection) -> None:
        self.closes += 1

    def tick(self, connections: Iterable[Connection], /) -> float:
        return 0.05


Start = Callable[[Path], LineServer]


@pytest.fixture
def start(line_servers: list[LineServer]) -> Start:
    def begin(path: Path) -> LineServer:
        LineServer(path, Echo()).start()
        return line_servers[-1]

    return begin


def lines(peer: socket.socket, count: int) -> list[bytes]:
    peer.settimeout(10)
    with peer.makefile("rb") as file:
        return [file.readline() for _ in range(count)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hello_and_echo_owner_only(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.sock"
    start(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with connect(path) as peer:
        peer.send(b'{"x":1}\n')
        assert lines(peer, 2) == [b'{"type":"hello"}\n', b'{"echo":{"x":1}}\n']


def test_a_directory_too_deep_for_an_address(start: Start, tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["deep-directory"] * 12) / "a.sock"
    assert len(str(path)) > 108
    start(path)
    with connect(path) as peer:
        assert lines(peer, 1) == [b'{"type":"hello"}\n']
    assert remove_stale(path.parent, "*.sock") == 0


def test_garbage_is_answered_and_too_much_of_it_closes(start: Start, tmp_path: Path) -> None:
    start(tmp_path / "a.sock")
    with connect(tmp_path / "a.sock") as peer:
        peer.send(b"garbage\n")
        assert b"no JSON object" in lines(peer, 2)[1]
        peer.send(b"garbage\n" * 100)
        with peer.makefile("rb") as file:
            assert file.read().count(b"\n") <= 2
    with connect(tmp_path / "a.sock") as peer:
        assert lines(peer, 1)  # and the next peer is served


def test_a_fault_in_the_handler_is_that_peers_answer(start: Start, tmp_path: Path) -> None:
    server = start(tmp_path / "a.sock")
    with connect(tmp_path / "a.sock") as peer:
        peer.send(encode_line({"op": "raise", "id": 7}) + encode_line({"x": 1}))
        _, error, echo = lines(peer, 3)
    assert b'"id":7' in error
    assert b"asked to" in error
    assert echo == b'{"echo":{"x":1}}\n'
    assert server.faults == 1


def test_a_peer_that_does_not_read_is_closed_and_costs_no_memory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_server, "MAX_OUT_BYTES", 10_000)
    server = start(tmp_path / "a.sock")
    with connect(tmp_path / "a.sock") as deaf, connect(tmp_path / "a.sock") as peer:
        until(lambda: len(server._connections) == 2)
        deaf.send(encode_line({"times": 50_000}))
        until(lambda: len(server._connections) == 1)
        peer.send(b'{"x":1}\n')
        assert lines(peer, 2)[1] == b'{"echo":{"x":1}}\n'


def test_too_many_peers_are_refused(start: Start, tmp_path: Path) -> None:
    start(tmp_path / "a.sock")
    peers = [connect(tmp_path / "a.sock") for _ in range(MAX_CONNECTIONS)]
    try:
        for peer in peers:
            assert lines(peer, 1) == [b'{"type":"hello"}\n']
        with connect(tmp_path / "a.sock") as late:
            assert b"too many connections" in lines(late, 1)[0]
    finally:
        for peer in peers:
            peer.close()


def test_who_may_connect() -> None:
    assert allowed(1000, [1000], 1000, None)
    assert allowed(0, [0], 1000, None)
    assert not allowed(1001, [1000], 1000, None)
    assert allowed(1001, [50, 60], 1000, 60)
    assert not allowed(1001, [50], 1000, 60)


def test_sockets_of_the_dead_are_removed_and_of_the_living_not(
    start: Start, tmp_path: Path
) -> None:
    start(tmp_path / "stats-1.sock")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "stats-2.sock"))
    dead.close()
    (tmp_path / "stats-3.sock").write_text("no socket")
    assert remove_stale(tmp_path, "stats-*.sock") == 1
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["stats-1.sock", "stats-3.sock"]
    assert sockets_of([tmp_path, tmp_path / "none"], [1, 2, 3], "stats-{pid}.sock") == [
        tmp_path / "stats-1.sock"
    ]


@pytest.mark.root
def test_a_socket_that_another_user_put_there_is_left_alone(tmp_path: Path) -> None:
    """Records from it would be counted, and its answers believed."""
    path, nobody = tmp_path / f"knobs-{os.getpid()}-dp0.sock", 65534
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert sockets_of([tmp_path], [os.getpid()], "knobs-{pid}-dp*.sock") == [path]
        os.chown(path, nobody, nobody)
        assert sockets_of([tmp_path], [os.getpid()], "knobs-{pid}-dp*.sock") == []
        with subprocess.Popen(["sleep", "60"], user=nobody) as engine:
            theirs = tmp_path / f"knobs-{engine.pid}-dp0.sock"
            path.rename(theirs)
            assert sockets_of([tmp_path], [engine.pid], "knobs-{pid}-dp*.sock") == [theirs]
            engine.kill()


def test_a_link_to_a_socket_is_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "elsewhere"))
        (tmp_path / "stats-1.sock").symlink_to(tmp_path / "elsewhere")
        assert sockets_of([tmp_path], [1], "stats-{pid}.sock") == []


def test_a_stale_socket_of_the_same_name_is_taken_over(start: Start, tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "a.sock"))
    dead.close()
    start(tmp_path / "a.sock")
    with connect(tmp_path / "a.sock") as peer:
        assert lines(peer, 1)
    with pytest.raises(OSError, match="in use"):
        LineServer(tmp_path / "a.sock", Echo())


def test_a_forked_child_neither_serves_nor_deletes(start: Start, tmp_path: Path) -> None:
    server = start(tmp_path / "a.sock")
    with connect(tmp_path / "a.sock") as peer:
        assert lines(peer, 1)
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0 if (tmp_path / "a.sock").exists() else 1)
        assert os.waitpid(child, 0)[1] == 0
        peer.send(b'{"x":1}\n')
        assert lines(peer, 1) == [b'{"echo":{"x":1}}\n']
    server.stop()
    assert not (tmp_path / "a.sock").exists()


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="writable by everybody"):
        LineServer(shared / "a.sock", Echo())


def test_a_server_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    server = LineServer(tmp_path / "a.sock", Echo())
    server.stop()
    server.stop()
    assert list(tmp_path.iterdir()) == []

"""Pids, roles and lives of a server's processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from servoscope.sidecar.attach.processes import (
    engine_start,
    is_local,
    listeners,
    process_environment,
    resident_bytes,
    role_of,
    server_processes,
    still_runs,
)


@pytest.mark.parametrize(
    ("engine", "argv", "listens", "role"),
    [
        ("vllm", ["python", "-m", "vllm.entrypoints.openai.api_server"], True, "api"),
        ("vllm", ["VLLM::APIServer_1"], False, "api"),
        ("vllm", ["VLLM::EngineCore_DP0"], False, "core"),
        ("vllm", ["VLLM::Worker_TP1"], False, "worker"),
        ("vllm", ["VLLM::DPCoordinator"], False, "coordinator"),
        ("vllm", ["python", "-c", "from multiprocessing.resource_tracker import main"], False,
         None),
        ("vllm", ["sh"], False, None),
        ("llamacpp", ["llama-server"], True, "server"),
        ("llamacpp", ["llama-server"], False, "worker"),
    ],
)  # fmt: skip
def test_roles(engine: str, argv: list[str], listens: bool, role: str | None) -> None:
    assert role_of(engine, argv, listens=listens) == role


CHILD = """
import socket, subprocess, sys
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
child = subprocess.Popen(["VLLM::EngineCore", "-c", "import sys; sys.stdin.read()"],
                         executable=sys.executable, stdin=subprocess.PIPE)
print(s.getsockname()[1], child.pid, flush=True)
sys.stdin.read()
"""


def test_the_processes_of_a_port_and_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        port, child = map(int, server.stdout.readline().split())
        found = server_processes("vllm", port)
        assert [(p.pid, p.role) for p in found] == [(server.pid, "api"), (child, "core")]
        assert found[0].uid == os.getuid()
        assert found[0].argv[0] == sys.executable
        assert still_runs(found[:1])
        again = replace(found[0], start_seconds=found[0].start_seconds - 100)
        assert not still_runs([again])  # the same pid, another process
        # A step of the wall clock moves what psutil says of every process's start.
        boot = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600)
        stepped = server_processes("vllm", port)
        assert stepped[0].start_unix_seconds - found[0].start_unix_seconds > 3000
        assert still_runs(found[:1])
        assert [p.start_seconds for p in stepped] == [p.start_seconds for p in found]
        server.stdin.close()
        server.wait()
    assert not still_runs(found[:1])
    assert server_processes("vllm", port) == []
    assert resident_bytes(found[0].pid) is None
    assert process_environment(found[0].pid) == {}


def test_listeners_and_own_process() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert (port, os.getpid()) in {(x.port, x.pid) for x in listeners()}
    assert (resident_bytes(os.getpid()) or 0) > 1_000_000


def test_local_addresses() -> None:
    assert is_local("127.0.0.1")
    assert is_local("127.8.8.8")
    assert is_local("localhost")
    assert not is_local("203.0.113.9")


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_the_start_of_an_engine_moves_with_the_wall_clock(jump: float) -> None:
    """So its age, by which the warm-up goes, is the same on either side of a step."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = server_processes("vllm", server.getsockname()[1])
    now = psutil.Process().create_time() + 1_000.0 + jump
    start = engine_start(found, now)
    age = now - (start or 0.0)
    true_age = time.clock_gettime(time.CLOCK_BOOTTIME) - found[0].start_seconds
    assert 0.0 < age <= true_age < age + 60.0  # read one after the other
    assert engine_start([], now) is None

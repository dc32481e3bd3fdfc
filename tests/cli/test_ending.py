"""Told to end, every command that runs for long ends in order with 0, at whatever moment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servoscope.cli.ending import until_told
from servoscope.cli.main import main

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start_(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "servoscope.cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "SERVOSCOPE_STATE": str(tmp_path / "state"),
                "SERVOSCOPE_RUN_DIR": str(tmp_path / "run"),
                "SERVOSCOPE_COLLECTOR__PORT": "0",
                "SERVOSCOPE_SIDECAR__TAP": "'off'",
            },
        )
        running.append(process)
        return process

    yield start_
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """A server that takes connections and never answers: attaching to it hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", listener


@BOTH
@pytest.mark.parametrize("command", ["sidecar", "up"])
def test_in_the_middle_of_attaching(
    start: Start, silent: tuple[str, socket.socket], command: str, number: signal.Signals
) -> None:
    url, listener = silent
    process = start(command, url)
    connection, _ = listener.accept()
    with connection:
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said


@BOTH
def test_a_collector_that_stores(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("collector")
    database = tmp_path / "state" / "collector.duckdb"
    deadline = time.monotonic() + 60
    while not database.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said


@BOTH
async def test_work_is_cancelled_and_cleans_up(number: signal.Signals) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
            steps.append("went on")
        finally:
            steps.append("cleaned up")

    await until_told(work())
    assert steps == ["cleaned up"]
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


async def test_what_work_raises_is_raised_and_a_cancellation_is_one() -> None:
    async def fail() -> None:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        await until_told(fail())
    task = asyncio.create_task(until_told(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("command", ["up", "sidecar", "collector"])
def test_help_tells_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"], sys.stdout)
    assert "0 ended as told" in " ".join(capsys.readouterr().out.split())

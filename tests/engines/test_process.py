"""The end of a process tree: also of what lost its parent, and of what it left in shared memory."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engines.process import SHARED_MEMORY, EngineError, ProcessTree, run

SPIN = "while True: pass"
#: Deaf to SIGTERM, and with a child that spins, deaf to it too, as a scheduler may be.
DEAF = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {SPIN!r}])
signal.pause()
"""
#: Gone at once; its child is nobody's child then.
ORPHAN = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {SPIN!r}])
"""
MAPPED = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
    print("mapped", flush=True)
    time.sleep(600)
"""


def tree(tmp_path: Path, script: str, *args: str) -> ProcessTree:
    return ProcessTree(
        [sys.executable, "-c", script, *args],
        env={},
        cwd=tmp_path,
        log_path=tmp_path / "log",
    )


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within the bound")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("gently", [True, False])
def test_deaf_processes_end_with_their_children(tmp_path: Path, gently: bool) -> None:
    started = tree(tmp_path, DEAF)
    until(lambda: len(started.members()) == 2)
    pids = [process.pid for process in started.members()]
    assert pids[0] == started.pid
    started.end(gently=gently, seconds=0.5 if gently else 20.0)
    assert not any(runs(pid) for pid in pids)
    assert started.ended() is not None
    assert started.members() == []


def test_a_child_whose_parent_is_gone_ends_too(tmp_path: Path) -> None:
    started = tree(tmp_path, ORPHAN)
    until(lambda: started.ended() is not None)
    (orphan,) = started.members()
    assert orphan.pid != started.pid
    started.end(gently=True)
    assert not runs(orphan.pid)


def test_mapped_shared_memory_is_removed_and_others_stay(tmp_path: Path) -> None:
    ours, others = (Path(SHARED_MEMORY) / f"servoscope-test-{uuid.uuid4().hex}" for _ in range(2))
    others.touch()
    try:
        started = tree(tmp_path, MAPPED, str(ours))
        until(lambda: "mapped" in (tmp_path / "log").read_text())
        started.end(gently=False)
        assert not ours.exists()
        assert others.exists()
    finally:
        others.unlink()
        ours.unlink(missing_ok=True)


def test_a_failed_command_tells_its_last_lines() -> None:
    with pytest.raises(EngineError, match=r"ended with 3:\n.*no such wheel"):
        run([sys.executable, "-c", "import sys; print('no such wheel'); sys.exit(3)"], 60)

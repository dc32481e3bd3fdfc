"""Processes that `up` starts end with it, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from servoscope.cli.children import Children

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('on', flush=True); time.sleep(600)"
    ),
]


def _gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_all_end(tmp_path: Path) -> None:
    children = Children(tmp_path)
    pids = [children.start(f"c{i}", SLEEP).process.pid for i in range(3)]
    children.end_all()
    assert all(_gone(pid) for pid in pids)
    assert children.running == []


def test_one_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    children = Children(tmp_path)
    child = children.start("stubborn", STUBBORN)
    deadline = time.monotonic() + 10
    while "on" not in child.last_lines() and time.monotonic() < deadline:
        time.sleep(0.02)
    children.end_seconds = 0.3
    children.end_all()
    assert _gone(child.process.pid)
    assert child.process.returncode == -signal.SIGKILL


def test_the_dead_are_told_with_their_last_words(tmp_path: Path) -> None:
    children = Children(tmp_path)
    child = children.start("short", [sys.executable, "-c", "print('because'); raise SystemExit(3)"])
    child.process.wait(10)
    assert children.dead() == [child]
    assert child.last_lines() == "because"


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from servoscope.cli.children import Children;"
        "c = Children(Path(sys.argv[1]));"
        "p = c.start('x', [sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(p.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    assert _gone(pid)

"""Processes that ``servoscope up`` starts, and their certain end.

Each child gets a log file and, on Linux, the kernel's promise to end it when its parent dies, so
that not even ``kill -9`` of ``up`` leaves one behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Child", "Children"]

PR_SET_PDEATHSIG = 1
END_SECONDS = 8.0
LOG_KEEP_BYTES = 4 << 20


@dataclass(slots=True)
class Child:
    """One started process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def last_lines(self, count: int = 5) -> str:
        """The end of its log, for the message when it has died."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 8192))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-count:])


def _end_with_parent() -> None:
    """Runs in the child between fork and exec: ask for SIGTERM when the parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass(slots=True)
class Children:
    """Starts children and ends all of them, each by its own pid."""

    log_dir: Path
    running: list[Child] = field(default_factory=list)
    end_seconds: float = END_SECONDS

    def start(
        self, name: str, argv: Sequence[str], extra_environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start one. Its output goes to ``log_dir/<name>.log`` (cut when over 4 MiB)."""
        self.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self.log_dir / f"{name}.log"
        mode = "ab" if log.exists() and log.stat().st_size < LOG_KEEP_BYTES else "wb"
        with log.open(mode) as sink:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **(extra_environment or {})},
                # A group of its own: Ctrl-C reaches `up` alone, which then ends all in order.
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads yet, one libc call
            )
        child = Child(name, process, log)
        self.running.append(child)
        return child

    def dead(self) -> list[Child]:
        """Those that ended by themselves."""
        return [child for child in self.running if not child.alive]

    def forget(self, child: Child) -> None:
        """Leave one that has ended out of what ``dead`` tells."""
        self.running = [other for other in self.running if other is not child]

    def end_all(self) -> None:
        """SIGTERM in reverse order of start, then SIGKILL to what is left after a few seconds."""
        for child in reversed(self.running):
            if child.alive:
                child.process.terminate()
        deadline = time.monotonic() + self.end_seconds
        for child in reversed(self.running):
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self.running.clear()

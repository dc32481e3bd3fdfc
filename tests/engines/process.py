"""What real engines in tests share: cache, lock, commands, ports and the end of process trees.

An engine is a tree: an HTTP server that spawns schedulers and detokenizers. A scheduler spins on a
core while it waits, so one that outlives its test slows every test after it: `ProcessTree` ends
all that belongs to the tree, whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

__all__ = [
    "ROOT",
    "EngineError",
    "ProcessTree",
    "cache_directory",
    "free_port",
    "install_checkout",
    "locked",
    "run",
]

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = "/dev/shm/"


class EngineError(RuntimeError):
    """The engine could not be built or started; the text ends with its last log lines."""


def cache_directory() -> Path:
    """Where environments and models are kept (``SERVOSCOPE_CACHE``, else ~/.cache/servoscope)."""
    named = os.environ.get("SERVOSCOPE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "servoscope"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One builder at a time, over all processes of this user."""
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f".{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str], seconds: float) -> str:
    """Standard output of a command. Raises EngineError with its last lines when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-3000:]
        raise EngineError(f"{' '.join(command)[:200]} ended with {done.returncode}:\n{tail}")
    return done.stdout


def install_checkout(home: Path, python: Path) -> None:
    """This checkout, editable and without dependencies, unless it is there already."""
    declared = (ROOT / "pyproject.toml").read_bytes()
    wanted = f"{ROOT} {hashlib.sha256(declared).hexdigest()}"
    stamp = home / ".servoscope-checkout"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    run([str(python), "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], 300)
    stamp.write_text(wanted)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ProcessTree:
    """A process in a session of its own, and everything that it starts.

    Members are found by parentage and by session: children of a parent that died have another
    parent, but not another session.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> None:
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        # By Process objects (pid and start time): a pid that was used again is not ours.
        self._known: dict[int, psutil.Process] = {}
        self._shared_memory: set[Path] = set()

    @property
    def pid(self) -> int:
        """Pid of the first process."""
        return self._process.pid

    def ended(self) -> int | None:
        """Exit status of the first process; None while it runs."""
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """All that run now, the first process first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                self._known.setdefault(process.pid, process)
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.pid:
                    self._known.setdefault(process.pid, process)
        self._known = {pid: p for pid, p in self._known.items() if _runs(p)}
        return list(self._known.values())

    def note_shared_memory(self) -> None:
        """Remember the files in SHARED_MEMORY that the members have mapped, to remove them."""
        for process in self.members():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                self._shared_memory |= {
                    Path(line[line.index(SHARED_MEMORY) :])
                    for line in maps.splitlines()
                    if SHARED_MEMORY in line and not line.endswith(" (deleted)")
                }

    def end(self, *, gently: bool, seconds: float = 20.0) -> None:
        """End all, and remove the shared memory that killed processes leave behind.

        ``gently`` asks the first process and waits, before what is left is killed. Raises
        EngineError when something cannot be ended.
        """
        self.note_shared_memory()
        if gently and self.ended() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)
        # More than once: a process may start another while it is looked for.
        for _ in range(5):
            members = self.members()
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)
            _, members = psutil.wait_procs([p for p in members if _runs(p)], timeout=seconds)
            members = self.members()
            if not members:
                break
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        if members:
            raise EngineError(f"still running after SIGKILL: {[p.pid for p in members]}")


def _runs(process: psutil.Process) -> bool:
    """False for what has ended and only waits to be read by its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

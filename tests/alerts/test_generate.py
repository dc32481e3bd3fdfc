from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from servoscope.alerts.data import data_directory, data_text
from servoscope.alerts.generate import main

ALERTS = data_directory("slos").parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    copy = tmp_path / "alerts"
    shutil.copytree(ALERTS, copy, ignore=shutil.ignore_patterns("servoscope", "runbooks"))
    return copy


def run(*arguments: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    return main([str(a) for a in arguments], out), out.getvalue()


def test_what_is_committed_is_what_is_generated() -> None:
    assert run("--check") == (0, "")


def test_check_shows_the_difference_and_writes_nothing(root: Path) -> None:
    path = root / "rules" / "default.yaml"
    changed = path.read_text("utf-8").replace("> 0.144)", "> 0.2)", 1)
    path.write_text(changed, "utf-8")
    status, text = run("--check", "--root", root)
    assert status == 1
    assert "> 0.2)" in text
    assert path.read_text("utf-8") == changed
    assert run("--root", root) == (0, "")
    assert run("--check", "--root", root) == (0, "")


def test_rules_whose_spec_is_gone_are_reported_and_removed(root: Path) -> None:
    (root / "slos" / "chat.yaml").write_text(
        "service: chat\nobjectives: [{name: e, sli: error_ratio, target: 99%}]\n", "utf-8"
    )
    assert run("--root", root)[0] == 0
    assert (root / "rules" / "chat.yaml").is_file()
    (root / "slos" / "chat.yaml").unlink()
    status, text = run("--check", "--root", root)
    assert (status, "no spec makes this file" in text) == (1, True)
    assert run("--root", root)[0] == 0
    assert not (root / "rules" / "chat.yaml").exists()


def test_a_wrong_spec_is_named_by_file_and_key(root: Path) -> None:
    (root / "slos" / "chat.yaml").write_text("service: chat\nobjectives: []\n", "utf-8")
    assert run("--check", "--root", root) == (
        2,
        "chat.yaml: line 2: objectives: must be a list with at least one objective\n",
    )
    (root / "slos" / "chat.yaml").rename(root / "slos" / "engines.yaml")
    assert run("--root", root)[0] == 2


def test_shipped_files_are_found_and_nothing_else_can_be_asked_for() -> None:
    assert data_text("slos", "default.yaml").startswith("#")
    with pytest.raises(ValueError, match="plain file name"):
        data_text("slos", "../alertmanager.yaml")
    with pytest.raises(ValueError, match="not one of"):
        data_directory("servoscope")

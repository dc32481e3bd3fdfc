"""Where an SGLang's request files are from here, and who else writes there: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servoscope.sidecar.attach.processes import role_of
from servoscope.sidecar.attach.sglang import EngineFilesOf, engine_files
from servoscope.sidecar.attach.target import Target

INFO = {"export_metrics_to_file": True, "log_requests": True, "log_requests_level": 0}


def target(pid: int | None, directory: str, *, argv: tuple[str, ...] = ()) -> Target:
    return Target(
        url="http://127.0.0.1:1", host="127.0.0.1", port=1, server="127.0.0.1:1", engine="sglang",
        version="0.5.23", model_name="m", model_version="v", argv=argv,
        pids={} if pid is None else {pid: "server"},
        settings={} if argv else INFO | {"export_metrics_to_file_dir": directory},
    )  # fmt: skip


def process(cwd: Path, *words: str) -> subprocess.Popen[bytes]:
    """Something whose command line is that of an engine."""
    made = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", "sglang.launch_server", *words],
        cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()
    return made


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    for name in ("one", "two"):
        (tmp_path / name / "out").mkdir(parents=True)
    flag = "--export-metrics-to-file-dir"
    made = [
        process(tmp_path / "one", flag, "out"),
        process(tmp_path / "one", f"{flag}={tmp_path / 'one' / 'out'}"),
        process(tmp_path / "two", flag, "out"),
    ]
    yield made
    for one in made:
        one.communicate(b"\n", timeout=20)


def test_a_relative_directory_is_where_the_engine_runs(
    engines: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    found = engine_files(target(engines[0].pid, "out"))
    assert found.directory == found.told_directory == tmp_path / "one" / "out"
    assert found.settings.file
    by_argv = target(engines[0].pid, "", argv=("sglang", "--export-metrics-to-file-dir", "out"))
    assert engine_files(by_argv).directory == tmp_path / "one" / "out"


def test_others_that_write_there_are_found(
    engines: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    shared = engine_files(target(engines[0].pid, "out"))
    assert shared.others() == [engines[1].pid]
    alone = engine_files(target(engines[2].pid, "out"))
    assert alone.others() == []
    gone = engine_files(target(engines[2].pid, str(tmp_path / "nowhere")))
    assert gone.others() == []


def test_without_its_processes_only_an_absolute_directory_can_be_found(tmp_path: Path) -> None:
    assert engine_files(target(None, "out")).directory is None
    assert engine_files(target(None, str(tmp_path))).directory == tmp_path
    assert engine_files(target(None, "")).directory is None


def test_it_is_found_out_once_a_life_of_the_engine(tmp_path: Path) -> None:
    now = [target(None, str(tmp_path))]
    files = EngineFilesOf(lambda: now[0])
    first = files()
    assert files() is first
    now[0] = target(None, str(tmp_path / "other"))
    assert files().directory == tmp_path / "other"


@pytest.mark.parametrize(
    ("line", "listens", "role"),
    [
        (("python", "-m", "sglang.launch_server"), True, "server"),
        (("sglang::scheduler_TP0",), False, "scheduler"),
        (("sglang::detokenizer",), False, "detokenizer"),
        (("sglang::data_parallel_controller",), False, "coordinator"),
        (("sglang::tokenizer_worker:77",), False, "api"),
        (("python", "-c", "from multiprocessing.resource_tracker import main"), False, None),
    ],
)
def test_roles_by_title(line: tuple[str, ...], listens: bool, role: str | None) -> None:
    assert role_of("sglang", line, listens=listens) == role


def test_this_process_is_nobody_elses_engine() -> None:
    assert os.getpid() not in engine_files(target(None, "/")).others()

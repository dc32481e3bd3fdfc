"""The hook of the live chunk: built once, and a clear word where it cannot be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from servoscope.lab.embedded.chunk_hook import ChunkHook, HookError, build
from servoscope.lab.embedded.server import EmbeddedEngine, EngineStartError


def test_it_is_built_once_for_its_source_in_a_directory_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path / "hook")
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path / "hook") == library  # it is there: nothing to compile


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook").chmod(0o777)
    with pytest.raises(PermissionError, match="writable by everybody"):
        build(tmp_path / "hook")


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(HookError, match=r"needs a C compiler.*'no-such-compiler'.*--live-chunk"):
        build(tmp_path / "hook")
    with pytest.raises(EngineStartError, match="needs a C compiler"):
        EmbeddedEngine(tmp_path, live_chunk=True).start()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'dlfcn.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(HookError, match=r"dlfcn\.h: No such file"):
        build(tmp_path / "hook")
    assert list((tmp_path / "hook").iterdir()) == []


def test_a_process_that_was_started_without_it_has_none() -> None:
    assert "chunk_hook" not in os.environ.get("LD_PRELOAD", "")
    assert ChunkHook.preloaded() is None

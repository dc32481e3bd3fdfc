"""The audit file: append only, private, bounded, and loud when it cannot be written."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from servoscope.sidecar.audit import AuditError, AuditLog


def test_lines_are_appended_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "audit.jsonl"
    log = AuditLog(path, 10_000)
    log.append({"n": 1})
    log.append({"n": 2, "text": "two\nlines"})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_ends_at_its_limit_and_says_what_to_do(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", 100)
    log.append({"x": "a" * 50})
    with pytest.raises(AuditError, match="move it away"):
        log.append({"x": "a" * 50})
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(AuditError, match="directory"):
        AuditLog(tmp_path / "directory", 1000).append({})
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditError):
        AuditLog(tmp_path / "link", 1000).append({})
    with pytest.raises(AuditError, match="not a regular file"):
        AuditLog(Path("/dev/null"), 1000).append({})
    with pytest.raises(AuditError, match="too long"):
        AuditLog(tmp_path / "audit.jsonl", 10**9).append({"x": "a" * 100_000})


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AuditError):
        AuditLog(Path("/proc/self/nothing/audit.jsonl"), 1000).append({})

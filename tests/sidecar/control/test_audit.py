"""The audit file: append only, private, bounded, and loud when it cannot be written."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from servoscope.sidecar.control.audit import AuditError, AuditLog


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


def test_a_line_that_did_not_fit_spoils_no_other(tmp_path: Path) -> None:
    """A limit on the size of files cuts a write short, as a full disk does."""
    path = tmp_path / "audit.jsonl"
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from servoscope.sidecar.control.audit import AuditError, AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]), 10**6)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "written = 0\n"
        "try:\n"
        "    while True:\n"
        "        log.append({'n': written, 'x': 'y' * 90})\n"
        "        written += 1\n"
        "except AuditError as error:\n"
        "    assert 'could be written' in str(error), error\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.RLIM_INFINITY))\n"
        "log.append({'n': written})\n"
        "print(written)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    ).stdout
    lines = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert lines == list(range(int(said) + 1))
    assert len(lines) > 2

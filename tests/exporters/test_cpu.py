"""/proc readers: the kernel's texts, processes that end, and this very process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters import cpu

TAIL = "S {parent} 10 10 0 -1 4194304 100 0 0 0 {user} {system} 7 8 20 0 5 0 {start} 99 {pages} 1\n"


def stat_text(
    pid: int = 42,
    name: str = "python3",
    parent: int = 1,
    user: int = 150,
    system: int = 50,
    start: int = 1_000,
    pages: int = 25,
) -> str:
    tail = TAIL.format(parent=parent, user=user, system=system, start=start, pages=pages)
    return f"{pid} ({name}) {tail}"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with 10 → 11 → 12 and 10 → 13, and things that are no processes."""
    (tmp_path / "stat").write_text("cpu  1 2 3\nbtime 1795950000\nprocesses 5\n")
    for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 10)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(stat_text(pid=pid, parent=parent))
        (folder / "cmdline").write_bytes(b"vllm\0serve\0--port\x008000\0")
        (folder / "environ").write_bytes(b"A=1\0B=x=y\0A=2\0broken\0=z\0")
        (folder / "status").write_text("Name:\tvllm\nUid:\t1000\t1001\t1000\t1000\n")
    (tmp_path / "14").mkdir()  # ended between the listing and the read
    (tmp_path / "self").mkdir()
    (tmp_path / "15").mkdir()
    (tmp_path / "15" / "stat").write_text("garbage")
    return tmp_path


def test_fields_and_units() -> None:
    stat = cpu.parse_stat(stat_text(), ticks=100.0, page_bytes=4096)
    assert stat == cpu.ProcessStat(
        pid=42,
        name="python3",
        state="S",
        parent_pid=1,
        cpu_seconds=2.0,
        threads=5,
        start_seconds=10.0,
        resident_bytes=25 * 4096,
    )


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n"), max_size=15),
    st.integers(0, 2**50),
)
def test_any_process_name_is_read(name: str, user: int) -> None:
    stat = cpu.parse_stat(stat_text(name=name, user=user), ticks=1.0)
    assert stat.name == name
    assert stat.cpu_seconds == user + 50
    assert stat.parent_pid == 1


@given(st.text(max_size=80) | st.builds(lambda n: stat_text()[:n], st.integers(0, 60)))
def test_a_text_of_another_form_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="stat"):
        cpu.parse_stat(text)


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="negative field -1"):
        cpu.parse_stat(stat_text(user=-1))
    assert cpu.parse_stat(stat_text(pages=-3)).resident_bytes == 0


def test_command_lines() -> None:
    assert cpu.parse_strings(b"a\0b c\0\0d\0") == ("a", "b c", "", "d")
    assert cpu.parse_strings(b"") == ()
    assert cpu.parse_strings(b"VLLM::EngineCore\0\0\0\0") == ("VLLM::EngineCore",)
    assert cpu.parse_strings(b"no zero") == ("no zero",)
    (odd,) = cpu.parse_strings(b"\xff\0")
    assert os.fsencode(odd) == b"\xff"


@given(
    st.dictionaries(
        st.from_regex(r"\A[A-Z_]{1,8}\Z"),
        st.text(st.characters(min_codepoint=1, max_codepoint=0xD7FF)),
    )
)
def test_environments(expected: dict[str, str]) -> None:
    data = b"".join(f"{k}={v}".encode() + b"\0" for k, v in expected.items())
    assert cpu.parse_environment(data) == expected


def test_a_made_up_proc(proc: Path) -> None:
    assert cpu.children(10, proc) == (11, 13)
    assert cpu.descendants(10, proc) == (11, 12, 13)
    assert cpu.descendants(12, proc) == ()
    assert cpu.command_line(11, proc) == ("vllm", "serve", "--port", "8000")
    assert cpu.environment(11, proc) == {"A": "1", "B": "x=y"}
    assert cpu.owner_uid(11, proc) == 1001
    ticks = os.sysconf("SC_CLK_TCK")
    assert cpu.start_unix_seconds(11, proc) == 1795950000 + 1_000 / ticks
    assert cpu.process_cpu_seconds(11, proc) == 200 / ticks
    assert cpu.resident_bytes(11, proc) == 25 * os.sysconf("SC_PAGE_SIZE")


def test_a_circle_of_parents_ends(proc: Path) -> None:
    (proc / "10" / "stat").write_text(stat_text(pid=10, parent=12))
    assert cpu.descendants(10, proc) == (11, 12, 13)


def test_a_process_that_is_gone_says_so(proc: Path) -> None:
    for read in (
        cpu.process_stat, cpu.process_cpu_seconds, cpu.resident_bytes, cpu.command_line,
        cpu.environment, cpu.owner_uid, cpu.start_unix_seconds,
    ):  # fmt: skip
        with pytest.raises(ProcessLookupError, match="process 14 is gone"):
            read(14, proc)


def test_a_broken_file_is_named(proc: Path) -> None:
    with pytest.raises(ValueError, match=r"/15/stat: stat: no \(name\)"):
        cpu.process_stat(15, proc)
    (proc / "stat").write_text("cpu 1\n")
    with pytest.raises(ValueError, match="no btime"):
        cpu.start_unix_seconds(10, proc)
    (proc / "10" / "status").write_text("Name:\tx\n")
    with pytest.raises(ValueError, match="no Uid"):
        cpu.owner_uid(10, proc)


def test_what_is_read_is_bounded(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MAX_PROC_BYTES", 100)
    (proc / "10" / "cmdline").write_bytes(b"x" * 10_000)
    assert cpu.command_line(10, proc) == ("x" * 100,)


def test_this_process_as_the_kernel_knows_it() -> None:
    pid = os.getpid()
    spent = time.process_time()
    tick = 1 / os.sysconf("SC_CLK_TCK")  # the kernel rounds down, user and system apart
    assert -3 * tick < cpu.process_cpu_seconds(pid) - spent < 5
    assert cpu.resident_bytes(pid) > 1_000_000
    assert cpu.owner_uid(pid) == os.geteuid()
    assert cpu.environment(pid)["PATH"] == os.environ["PATH"]
    assert cpu.process_stat(pid).parent_pid == os.getppid()
    assert cpu.start_unix_seconds(pid) < time.time() + 2
    assert cpu.start_unix_seconds(pid) == cpu.start_unix_seconds(pid)


def test_a_child_is_found_and_its_end_is_seen() -> None:
    code = "import sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        assert child.pid in cpu.children(os.getpid())
        assert child.pid in cpu.descendants(os.getpid())
        assert cpu.command_line(child.pid)[-1] == code
    finally:
        child.communicate()
    with pytest.raises(ProcessLookupError):
        cpu.process_stat(child.pid)

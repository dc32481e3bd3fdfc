"""Processes as /proc shows them: CPU seconds, memory, command line, environment, children.

Pure readers of the kernel's texts, and a thin shell that fetches them (``proc`` is a directory,
so that tests and containers can name another). Facts: proc(5). Linux only; standard library only.

Errors of the shell: ProcessLookupError when the process is gone, PermissionError where only the
same user or root may look (environment), ValueError with the file's name when a text is not what
proc(5) says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = [
    "MAX_PROC_BYTES",
    "PROC",
    "ProcessStat",
    "children",
    "command_line",
    "descendants",
    "environment",
    "owner_uid",
    "parse_boot_unix_seconds",
    "parse_environment",
    "parse_owner_uid",
    "parse_stat",
    "parse_strings",
    "process_cpu_seconds",
    "process_stat",
    "resident_bytes",
    "same_process",
    "start_unix_seconds",
]

PROC = Path("/proc")
MAX_PROC_BYTES = 4 * 1024 * 1024  # an environment can be large; nothing honest is larger
MAX_PROCESSES = 100_000

_T = TypeVar("_T")
_TICKS = float(os.sysconf("SC_CLK_TCK"))
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat that we use, in plain units."""

    pid: int
    name: str  # comm: cut to 15 characters by the kernel, so never match engines by it
    state: str
    parent_pid: int
    cpu_seconds: float  # user and system, of all threads; not of children
    threads: int
    start_seconds: float  # since boot
    resident_bytes: int


def parse_stat(text: str, ticks: float = _TICKS, page_bytes: int = _PAGE) -> ProcessStat:
    """Read /proc/<pid>/stat. Raises ValueError when it is not of that form."""
    # The name may hold spaces and parentheses: it ends at the LAST one.
    head, closing, tail = text.rpartition(")")
    pid, opening, name = head.partition("(")
    fields = tail.split()
    if not (opening and closing):
        raise ValueError(f"stat: no (name): {text[:80]!r}")
    try:
        return ProcessStat(
            pid=int(pid),
            name=name,
            state=fields[0],
            parent_pid=int(fields[1]),
            cpu_seconds=(_natural(fields[11]) + _natural(fields[12])) / ticks,
            threads=_natural(fields[17]),
            start_seconds=_natural(fields[19]) / ticks,
            resident_bytes=max(0, int(fields[21])) * page_bytes,
        )
    except (IndexError, ValueError) as error:
        raise ValueError(f"stat: {error}: {text[:80]!r}") from error


def parse_strings(data: bytes) -> tuple[str, ...]:
    """Read /proc/<pid>/cmdline: strings that each end in a zero byte.

    A process that renamed itself may leave one string without zero bytes, or padding behind it.
    """
    text = data.decode("utf-8", errors="surrogateescape").rstrip("\0")
    return tuple(text.split("\0")) if text else ()


def parse_environment(data: bytes) -> dict[str, str]:
    """Read /proc/<pid>/environ; of a name that stands twice the first counts, as for getenv."""
    found: dict[str, str] = {}
    for entry in parse_strings(data):
        name, equals, value = entry.partition("=")
        if equals and name:
            found.setdefault(name, value)
    return found


def parse_boot_unix_seconds(text: str) -> float:
    """Read ``btime`` of /proc/stat: when the machine booted. Raises ValueError without it."""
    match = re.search(r"^btime ([0-9]{1,15})$", text, re.MULTILINE)
    if match is None:
        raise ValueError("stat: no btime line")
    return float(match[1])


def parse_owner_uid(text: str) -> int:
    """Read the effective user of /proc/<pid>/status. Raises ValueError without it."""
    match = re.search(r"^Uid:\t[0-9]+\t([0-9]+)\t", text, re.MULTILINE)
    if match is None:
        raise ValueError("status: no Uid line")
    return int(match[1])


def process_stat(pid: int, proc: Path = PROC) -> ProcessStat:
    """State of a process now. A zombie is still there: see ``state`` "Z"."""
    return _named(pid, "stat", proc, lambda data: parse_stat(_text(data)))


def same_process(pid: int, start_seconds: float, proc: Path = PROC) -> bool:
    """Whether ``pid`` is still the process that started then (seconds since boot).

    A pid is given again, as a thread's id too: the start tells them apart.
    """
    try:
        return process_stat(pid, proc).start_seconds == start_seconds
    except (OSError, ValueError):
        return False


def process_cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """User and system CPU of all threads, in seconds. NOT scheduler CPU: engines spin."""
    return process_stat(pid, proc).cpu_seconds


def resident_bytes(pid: int, proc: Path = PROC) -> int:
    """Resident memory in bytes (shared pages counted in every process that has them)."""
    return process_stat(pid, proc).resident_bytes


def start_unix_seconds(pid: int, proc: Path = PROC) -> float:
    """When the process started, in seconds since the epoch; the kernel rounds boot to 1 s.

    The same for the whole life of a process: a changed value under one pid is another process.
    """
    boot = parse_boot_unix_seconds(_read(proc / "stat").decode("ascii", "replace"))
    return boot + process_stat(pid, proc).start_seconds


def command_line(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """Arguments of a process; empty for kernel threads and zombies."""
    return _named(pid, "cmdline", proc, parse_strings)


def environment(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Environment that a process was started with. PermissionError for another user's."""
    return _named(pid, "environ", proc, parse_environment)


def owner_uid(pid: int, proc: Path = PROC) -> int:
    """Effective user of a process."""
    return _named(pid, "status", proc, lambda data: parse_owner_uid(_text(data)))


def children(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Direct children of a process, by pid."""
    return tuple(sorted(child for child, parent in _parents(proc).items() if parent == pid))


def descendants(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Children, their children and so on, by pid; without ``pid`` itself."""
    by_parent: dict[int, list[int]] = {}
    for child, parent in _parents(proc).items():
        by_parent.setdefault(parent, []).append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in by_parent.get(waiting.pop(), []):
            if child not in found and child != pid:
                found.add(child)
                waiting.append(child)
    return tuple(sorted(found))


def _parents(proc: Path) -> dict[int, int]:
    """Parent of every process; those that end meanwhile are left out."""
    parents: dict[int, int] = {}
    for entry in os.scandir(proc):
        if not (entry.name.isascii() and entry.name.isdigit()) or len(parents) >= MAX_PROCESSES:
            continue
        try:
            stat = process_stat(int(entry.name), proc)
        except (OSError, ValueError):
            continue
        parents[stat.pid] = stat.parent_pid
    return parents


def _named(pid: int, name: str, proc: Path, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(_read(proc / str(pid) / name))
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} is gone") from None
    except ValueError as error:
        raise ValueError(f"{proc / str(pid) / name}: {error}") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PROC_BYTES)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(f"negative field {value}")
    return value

"""Whose processes a server is: from the listening socket to the pids, their roles and their age.

Everything here reads this host's process table through psutil and sees what this user may see:
root sees all, others see their own. A server in a container or on another host has no pids here;
that is an empty answer, not an error.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import psutil

from servoscope.exporters.cpu import process_stat

__all__ = [
    "Listener",
    "ServerProcess",
    "engine_start",
    "is_local",
    "listeners",
    "process_environment",
    "resident_bytes",
    "role_of",
    "server_processes",
    "still_runs",
]

_ENDED = ("Z", "X", "x")  # zombie or dead, in the words of proc(5)
_HELPERS = re.compile(r"multiprocessing[.]resource_tracker|multiprocessing[.]forkserver")
_SGLANG_ROLES = (
    ("sglang::scheduler", "scheduler"),
    ("sglang::detokenizer", "detokenizer"),
    ("sglang::data_parallel_controller", "coordinator"),
    ("sglang::tokenizer_worker", "api"),
)
_VLLM_ROLES = (
    ("VLLM::EngineCore", "core"),
    ("VLLM::Worker", "worker"),
    ("VLLM::DPCoordinator", "coordinator"),
    ("VLLM::APIServer", "api"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that listens on this host, and who owns it (``None``: not ours to see)."""

    host: str
    port: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One process of a server. ``start_seconds`` with the pid identifies it until the next boot.

    ``start_unix_seconds`` cannot: the kernel derives it from the wall clock, so a step of that
    clock moves the start of every process.
    """

    pid: int
    role: str
    start_unix_seconds: float
    argv: tuple[str, ...]
    uid: int | None
    start_seconds: float  # since boot


def listeners() -> list[Listener]:
    """Every listening TCP socket of this network namespace."""
    found = [
        Listener(c.laddr.ip, c.laddr.port, c.pid)
        for c in psutil.net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr
    ]
    return sorted(set(found), key=lambda x: (x.port, x.host, x.pid or 0))


def is_local(host: str) -> bool:
    """Whether ``host`` (name or address) is an address of this host."""
    own = {a.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for a in all_}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(a in own or ipaddress.ip_address(a).is_loopback for a in found)


def role_of(engine: str, argv: Sequence[str], *, listens: bool) -> str | None:
    """What a process of a server does, or ``None`` for helpers that are not worth a series.

    vLLM retitles its processes (``VLLM::EngineCore_DP0``); ``comm`` is cut to 15 characters, so
    the command line is what to read.
    """
    line = " ".join(argv)
    if _HELPERS.search(line):
        return None
    if engine == "vllm":
        for title, role in _VLLM_ROLES:
            if line.startswith(title):
                return role
        return "api" if listens else None
    if engine == "sglang":
        for title, role in _SGLANG_ROLES:
            if line.startswith(title):
                return role
    return "server" if listens else "worker"


def server_processes(engine: str, port: int, owners: Collection[int] = ()) -> list[ServerProcess]:
    """The processes that listen on ``port`` and all below them; the listening ones come first.

    ``owners``, if any, are the ones that listen: another server may have the same port on another
    address.
    """
    listening = [x.pid for x in listeners() if x.port == port and x.pid is not None]
    roots = dict.fromkeys(pid for pid in listening if not owners or pid in owners)
    found: dict[int, ServerProcess] = {}
    for pid in roots:
        _add(found, engine, pid, listens=True)
    for pid in roots:
        try:
            children = psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            continue
        for child in children:
            if child.pid not in roots:
                _add(found, engine, child.pid, listens=False)
    return list(found.values())


def _add(found: dict[int, ServerProcess], engine: str, pid: int, *, listens: bool) -> None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            argv = tuple(process.cmdline())
            start = process.create_time()
            uid = process.uids().effective
        since_boot = process_stat(pid).start_seconds
    except (psutil.Error, OSError, ValueError):
        return  # it ended meanwhile, or is not ours to see
    role = role_of(engine, argv, listens=listens)
    if role is not None:
        found[pid] = ServerProcess(pid, role, start, argv, uid, since_boot)


def engine_start(found: Sequence[ServerProcess], now: float) -> float | None:
    """When a server started, by a wall clock that shows ``now``; ``None`` when it is not seen.

    From its age, which no step of the wall clock changes; ``start_unix_seconds`` was right when it
    was read.
    """
    if not found:
        return None
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - found[0].start_seconds)


def still_runs(processes: Iterable[ServerProcess]) -> bool:
    """Whether every one of them is still the same process (a pid can be used again)."""
    for known in processes:
        try:
            stat = process_stat(known.pid)
        except ProcessLookupError:
            return False
        except (OSError, ValueError):
            continue  # not ours to see: no evidence against it
        if stat.state in _ENDED or stat.start_seconds != known.start_seconds:
            return False
    return True


def process_environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when not ours to see."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process, or ``None`` when it is gone or not ours to see."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None

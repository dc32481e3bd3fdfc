"""Unix sockets of the plug-in: where they are, who may connect, which of them are dead.

Standard library only. Peers are checked by SO_PEERCRED: the engine's own user and root may
connect. Another user only as a member of the group named in ``SERVOSCOPE_SOCKET_GROUP`` (socket
mode 0660, else 0600).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "GROUP_VARIABLE",
    "allowed",
    "connect",
    "peer_may",
    "remove_stale",
    "short_address",
    "sockets_of",
]

GROUP_VARIABLE = "SERVOSCOPE_SOCKET_GROUP"
_NAME_LIMIT = 100  # AF_UNIX addresses hold 108 bytes
_PEERCRED = struct.Struct("3i")  # pid, uid, gid


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address for ``path`` that fits into sockaddr_un, however deep the directory is."""
    if len(os.fsencode(path)) <= _NAME_LIMIT:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connect(path: Path) -> socket.socket:
    """A connected stream socket, or OSError."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_address(path) as address:
            peer.connect(address)
    except OSError:
        peer.close()
        raise
    return peer


def sockets_of(run_dirs: Iterable[Path], pids: Iterable[int], pattern: str) -> list[Path]:
    """Sockets named ``pattern`` (``{pid}`` filled in, may hold ``*``) of these processes.

    A process in a container names its socket by the pid that it sees itself: both are tried.
    A socket that belongs to neither the process's user, nor ours, nor root is somebody else's
    who took the name (a runtime directory in /tmp can be made by anybody), and is left alone.
    """
    wanted = [
        (pattern.format(pid=pid), owners)
        for outer in pids
        for names, owners in [_names_and_owners(outer)]
        for pid in names
    ]
    found: dict[Path, None] = {}
    for directory in run_dirs:
        for name, owners in wanted:
            with contextlib.suppress(OSError):
                for path in sorted(directory.glob(name)):
                    status = path.lstat()
                    if stat.S_ISSOCK(status.st_mode) and status.st_uid in owners:
                        found[path] = None
    return list(found)


def _names_and_owners(pid: int) -> tuple[tuple[int, ...], set[int]]:
    """What a process is called, also in inner pid namespaces (NSpid), and who may own its sockets.

    A process that cannot be seen has one name, and its sockets are ours or root's.
    """
    names: tuple[int, ...] = (pid,)
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                names = tuple(dict.fromkeys([pid, *map(int, line.split()[1:])]))
            elif line.startswith("Uid:"):
                owners.update(map(int, line.split()[1:]))
    return names, owners


def remove_stale(directory: Path, pattern: str) -> int:
    """Delete sockets that nobody listens on any more (their process died). Returns how many.

    Only a refused connection counts as dead: a pid may live in another pid namespace.
    """
    removed = 0
    for path in directory.glob(pattern):
        try:
            if not path.is_socket():
                continue
            connect(path).close()
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed += 1
    return removed


def allowed(uid: int, groups: Iterable[int], own_uid: int, group: int | None) -> bool:
    """Whether a peer may connect: the same user, root, or a member of the named group."""
    return uid in (own_uid, 0) or (group is not None and group in groups)


def peer_may(peer: socket.socket, group: int | None) -> tuple[bool, int, int]:
    """Whether a connected peer may stay, its pid and its uid (SO_PEERCRED)."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, gid = _PEERCRED.unpack(raw)
    groups = {gid}
    if group is not None:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("Groups:"):
                    groups.update(map(int, line.split()[1:]))
    return allowed(uid, groups, os.geteuid(), group), pid, uid

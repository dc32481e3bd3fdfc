"""Unix sockets of the plug-in: where they are, who may connect, and a small server in a thread.

Standard library only; runs inside the engine. The server never blocks: all its sockets are
non-blocking, every queue has a cap, and a peer that does not read is closed.

Peers are checked by SO_PEERCRED: the engine's own user and root may connect. Another user only
as a member of the group named in ``SERVOSCOPE_SOCKET_GROUP`` (socket mode 0660, else 0600).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import grp
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from servoscope.exporters.paths import private_directory
from servoscope.exporters.vllm.lines import LineDecoder, encode_line

__all__ = [
    "GROUP_VARIABLE",
    "Connection",
    "Handler",
    "LineServer",
    "allowed",
    "connect",
    "remove_stale",
    "sockets_of",
]

GROUP_VARIABLE = "SERVOSCOPE_SOCKET_GROUP"
MAX_CONNECTIONS = 16
MAX_OUT_BYTES = 4 << 20  # unsent bytes of one peer; beyond it the peer is closed
MAX_BAD_LINES = 32
_NAME_LIMIT = 100  # AF_UNIX addresses hold 108 bytes
_PEERCRED = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger("servoscope.plugin")


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
    """
    names = [pattern.format(pid=pid) for outer in pids for pid in _pids_of(outer)]
    found: dict[Path, None] = {}
    for directory in run_dirs:
        for name in names:
            with contextlib.suppress(OSError):
                for path in sorted(directory.glob(name)):
                    if path.is_socket():
                        found[path] = None
    return list(found)


def _pids_of(pid: int) -> tuple[int, ...]:
    """The pid and what it is called in inner pid namespaces (NSpid)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return tuple(dict.fromkeys([pid, *map(int, line.split()[1:])]))
    return (pid,)


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


def _peer_may(peer: socket.socket, group: int | None) -> tuple[bool, int, int]:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, gid = _PEERCRED.unpack(raw)
    groups = {gid}
    if group is not None:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("Groups:"):
                    groups.update(map(int, line.split()[1:]))
    return allowed(uid, groups, os.geteuid(), group), pid, uid


class Connection:
    """One peer. ``state`` is for the handler to use."""

    def __init__(self, peer: socket.socket, pid: int) -> None:
        self.peer = peer
        self.pid = pid
        self.decoder = LineDecoder()
        self.out = bytearray()
        self.closing = False  # close as soon as the output is sent
        self.state: dict[str, Any] = {}

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message."""
        self.out += encode_line(message)

    def flush(self) -> bool:
        """Send what the peer takes now. False when the peer is gone or does not read."""
        try:
            while self.out:
                del self.out[: self.peer.send(self.out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        return len(self.out) <= MAX_OUT_BYTES and not (self.closing and not self.out)


class Handler(Protocol):
    """What a server does. All methods run in the server's thread."""

    def hello(self) -> dict[str, Any]:
        """The first line to every peer."""

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        """One line from a peer."""

    def closed(self, connection: Connection) -> None:
        """The peer is gone."""

    def tick(self, _connections: Iterable[Connection], /) -> float:
        """Called after every round; returns the seconds until the next one at the latest."""


class LineServer:
    """JSON lines over one unix socket, served by one daemon thread."""

    def __init__(self, path: Path, handler: Handler, *, group_name: str | None = None) -> None:
        self.path = path
        self.faults = 0
        self._handler = handler
        self._group = grp.getgrnam(group_name).gr_gid if group_name else None
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._listener = self._listen()
        self._stopping = False
        self._owner = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name=f"servoscope-{path.stem}"[:15], daemon=True
        )

    def start(self) -> None:
        """Serve until ``stop`` or the end of the process."""
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and delete the socket. A forked child must not delete its parent's."""
        if self._stopping or os.getpid() != self._owner:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            with contextlib.suppress(OSError):
                self._wake()
            self._thread.join(timeout=2.0)

    def _listen(self) -> socket.socket:
        directory = private_directory(self.path.parent)
        if self._group is not None:
            os.chown(directory, -1, self._group)
            directory.chmod(0o750)
        remove_stale(directory, self.path.name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with short_address(self.path) as address:
                listener.bind(address)
            if self._group is not None:
                os.chown(self.path, -1, self._group)
            self.path.chmod(0o600 if self._group is None else 0o660)
            listener.listen(MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        return listener

    def _wake(self) -> None:
        self._wake_write.send(b"\0")

    def _forked(self) -> None:
        """In a forked child: the thread is gone, the descriptors must not keep the socket alive."""
        self._stopping = True
        for held in (self._listener, self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                held.close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.peer.close()

    def _run(self) -> None:
        wait = 0.0
        while not self._stopping:
            try:
                for key, _events in self._selector.select(max(0.0, wait)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_read:
                        self._read(key.data)
                wait = self._handler.tick(list(self._connections.values()))
                self._flush()
            except Exception as error:
                self._fault(error)
                wait = 0.5
        for connection in list(self._connections.values()):
            self._drop(connection)
        for held in (self._listener, self._wake_read, self._wake_write):
            held.close()

    def _fault(self, error: Exception) -> None:
        """A bug of ours: say so a few times, and never spin or end the engine's process."""
        self.faults += 1
        if self.faults <= 3:
            log.warning("servoscope: %s: %r", self.path.name, error)
        time.sleep(0.05)

    def _accept(self) -> None:
        try:
            peer, _address = self._listener.accept()
        except OSError:
            return
        may, pid, uid = _peer_may(peer, self._group)
        if not may or len(self._connections) >= MAX_CONNECTIONS:
            why = f"uid {uid} may not connect" if not may else "too many connections"
            with contextlib.suppress(OSError):
                peer.send(encode_line({"type": "refused", "why": why}))
            peer.close()
            return
        peer.setblocking(False)
        connection = Connection(peer, pid)
        self._connections[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)
        connection.send(self._handler.hello())

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.peer.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        for message in connection.decoder.feed(data):
            self._answer(connection, message)
        bad = connection.decoder.garbage + connection.decoder.oversize
        if bad > connection.state.get("bad_lines", 0):
            connection.state["bad_lines"] = bad
            connection.send({"type": "error", "why": "a line that is no JSON object was ignored"})
        if bad > MAX_BAD_LINES:
            self._drop(connection)

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        """A message that trips the handler is the peer's problem, not the other peers'."""
        try:
            self._handler.received(connection, message)
        except Exception as error:
            self.faults += 1
            connection.send({"type": "error", "id": message.get("id"), "why": repr(error)[:300]})

    def _flush(self) -> None:
        for connection in list(self._connections.values()):
            if not connection.flush():
                self._drop(connection)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
            self._selector.modify(connection.peer, events, connection)

    def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.peer)
        self._connections.pop(connection.peer.fileno(), None)
        connection.peer.close()
        self._handler.closed(connection)

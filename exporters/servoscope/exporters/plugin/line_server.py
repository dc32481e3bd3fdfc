"""JSON lines over one unix socket, served by one daemon thread inside the engine.

Never blocks: all sockets are non-blocking, every queue has a cap, and a peer that does not read,
or sends garbage, is closed. A fault in a handler is that peer's answer and nobody else's problem.
"""

from __future__ import annotations

import atexit
import contextlib
import grp
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from servoscope.exporters.paths import private_directory
from servoscope.exporters.plugin.lines import LineDecoder, encode_line
from servoscope.exporters.plugin.sockets import peer_may, remove_stale, short_address

__all__ = ["MAX_CONNECTIONS", "Connection", "Handler", "LineServer"]

MAX_CONNECTIONS = 16
MAX_OUT_BYTES = 4 << 20  # unsent bytes of one peer; beyond it the peer is closed
MAX_BAD_LINES = 32

log = logging.getLogger("servoscope.plugin")


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
        if not self._thread.is_alive():
            self._close()
        elif self._thread is not threading.current_thread():
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
        self._close()

    def _close(self) -> None:
        self._selector.close()
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
        may, pid, uid = peer_may(peer, self._group)
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

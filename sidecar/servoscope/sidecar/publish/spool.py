"""Batches for the collector on disk, so that a sidecar that is killed loses none it has counted.

One append-only file a server, mode 0600. A line is a batch, exactly as it is sent, or says that one
is settled: accepted, refused, given up (``spool_lines``). What is not settled goes again after a
start, under its own key (sidecar, epoch, seq): the collector counts it once however often it comes.
When all is settled the file is cut to nothing; one that is mostly settled lines is written anew.
Lines that were cut off or spoiled are skipped and counted.

Nothing is synced: what was written survives the end of this process, not of the machine (then the
last half minute may be missing). Methods are called from one thread and never raise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from servoscope.exporters.paths import private_directory
from servoscope.sidecar.publish.locked_file import append_whole, locked_file
from servoscope.sidecar.publish.spool_lines import (
    Batch,
    Key,
    batch_line,
    read_line,
    settled_line,
)

__all__ = ["MAX_AGE_SECONDS", "Spool"]

log = logging.getLogger(__name__)

#: The collector knows a key for 48 h (``collector.idempotency_hours``): an older batch could count
#: twice, so it is not sent.
MAX_AGE_SECONDS = 24 * 3600.0
_MAX_LINE_BYTES = 32 * 1024 * 1024
_WORTH_REWRITING = 0.75  # of the limit: below it a new file has room for a while
_QUIET_SECONDS = 600.0  # between two log lines of a disk that is full now and then
_SUFFIX = ".spool"


class Spool:
    """The file of one server in ``directory``, at most ``max_bytes``; opened on first use."""

    def __init__(
        self, directory: Path, server: str, max_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.path = directory / f"{server.replace('/', '_')}{_SUFFIX}"
        self._max_bytes = max_bytes
        self._clock = clock
        self._file: BinaryIO | None = None
        self._size = 0
        self._live: dict[Key, tuple[float, Batch]] = {}
        self._found: deque[Batch] = deque()  # taken by another thread
        self._told_at: float | None = None  # when ``problem`` was logged, by the monotonic clock
        self.problem: str | None = None  # why nothing is kept now, in words
        self.ready = False  # it was read, and can be written
        self.results: Counter[str] = Counter(
            dict.fromkeys(("written", "restored", "full", "failed", "old"), 0)
        )
        self.damaged_lines = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def take_found(self) -> list[Batch]:
        """What an earlier life left unsettled, oldest first; each is handed over once."""
        found: list[Batch] = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def open(self) -> bool:
        """Read what is there. False, and ``problem`` says why, when the file cannot be used."""
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink:
            return True
        self._let_go()  # of a file that somebody has removed
        ours = dict(self._live)
        try:
            private_directory(self.path.parent)
            self._file = locked_file(self.path)
            self._load(self._file, ours)
        except OSError as error:
            self._let_go()
            self._live = ours
            self._failed(error)
            return False
        self._well()
        self._sweep()
        return True

    def append(self, batch: Batch) -> None:
        """Keep a batch until it is settled. What cannot be kept is counted, in records."""
        at = self._clock()
        line = batch_line(batch, at)
        if not self.open():
            self.results["failed"] += batch.records
            return
        try:
            if not self._room(len(line)):
                self.results["full"] += batch.records
                self._tell(f"{self.path} is full ({self._max_bytes} bytes)")
                return
            self._write(line)
        except OSError as error:
            self.results["failed"] += batch.records
            self._failed(error)
            return
        self._live[batch.key] = (at, batch)
        self.results["written"] += batch.records
        self._well()

    def settle(self, key: Key) -> None:
        """A batch has come to its end. Where this cannot be written it is sent again: no harm."""
        if self._live.pop(key, None) is None or self._file is None:
            return
        try:
            if not self._live:
                os.ftruncate(self._file.fileno(), 0)
                self._size = 0
            elif self._room(len(line := settled_line(key))):
                self._write(line)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Let go of the file; a file that holds nothing goes."""
        if self._file is not None and not self._size:
            with contextlib.suppress(OSError):
                if os.fstat(self._file.fileno()).st_nlink:
                    self.path.unlink()
        self._let_go()

    # ---- writing -------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        if self._file is not None:
            self._size = append_whole(self._file.fileno(), line, self._size)

    def _room(self, more: int) -> bool:
        """Whether ``more`` bytes may be added; makes room where that is worth it."""
        if self._size + more <= self._max_bytes:
            return True
        lines = [batch_line(batch, at) for at, batch in self._live.values()]
        if sum(map(len, lines)) + more > _WORTH_REWRITING * self._max_bytes:
            return False
        self._rewrite(lines)
        return True

    def _rewrite(self, lines: list[bytes]) -> None:
        """The live lines into a new file that takes the place of this one."""
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        file, size = locked_file(fresh), 0
        try:
            for line in lines:
                size = append_whole(file.fileno(), line, size)
            fresh.replace(self.path)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._size = file, size

    # ---- reading -------------------------------------------------------------------------------

    def _load(self, file: BinaryIO, ours: dict[Key, tuple[float, Batch]]) -> None:
        """Batches that are not settled; ours that the file has lost are written again."""
        self._live, self._size = {}, 0
        for line in self._lines(file):
            if (parsed := read_line(line)) is None:
                self.damaged_lines += 1
                continue
            key, at, batch = parsed
            if batch is not None:
                self._live[key] = (at, batch)
            else:
                self._live.pop(key, None)
        now = self._clock()
        for key, (at, kept) in list(self._live.items()):
            if now - at > MAX_AGE_SECONDS:
                self.results["old"] += kept.records
                del self._live[key]
                continue
            self._found.append(kept)
            self.results["restored"] += kept.records
        os.ftruncate(file.fileno(), self._size if self._live else 0)
        self._size = self._size if self._live else 0
        for key, (at, mine) in ours.items():
            self._write(batch_line(mine, at))
            self._live[key] = (at, mine)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Whole lines up to the limit; ``_size`` follows. The rest is cut off by the caller."""
        while self._size < self._max_bytes:
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                return
            if not line.endswith(b"\n"):
                break
            self._size += len(line)
            yield line
        if os.fstat(file.fileno()).st_size > self._size:
            self.damaged_lines += 1

    def _sweep(self) -> None:
        """Files of servers that nobody has watched for so long that they would not be sent."""
        with contextlib.suppress(OSError):
            for path in self.path.parent.iterdir():
                if path != self.path and _SUFFIX in path.name:
                    with contextlib.suppress(OSError):  # in use, or no file
                        self._remove_if_old(path)

    def _remove_if_old(self, path: Path) -> None:
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and self._clock() - found.st_mtime > MAX_AGE_SECONDS:
            with locked_file(path):
                path.unlink()
            log.warning("removed %s (%d bytes): too old to be sent", path, found.st_size)

    # ---- what is wrong -------------------------------------------------------------------------

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _failed(self, error: OSError) -> None:
        why = str(error) if error.errno is None else f"{self.path}: {error.strerror}"
        self._tell(why)

    def _tell(self, why: str) -> None:
        now = time.monotonic()
        if self._told_at is None or (not self.problem and now - self._told_at > _QUIET_SECONDS):
            log.warning("records are not kept on disk: %s", why)
            self._told_at = now
        self.problem, self.ready = why, False

    def _well(self) -> None:
        self.problem, self.ready = None, True

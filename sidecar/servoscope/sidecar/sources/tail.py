"""Follows a directory of files that another process appends lines to. Blocking; one thread's.

The files are hourly (``sglang-request-metrics-YYYYmmdd_HH.log``), but nothing here trusts the
hours: a clock that was set back makes the writer go on in an older file, so every file that grows
is read. What can happen to a file, and what is done:

- it has no newline at its end: that line is being written; it is read when it is whole.
- it was renamed (a rotation): it is read on by its descriptor for as long as it is the newest one,
  or grows.
- it got shorter (truncated in place, also when it is longer again by now), or another one has its
  name: it is read from its start.
- it cannot be opened: counted; a ``problem`` only where it is the newest, the one that grows. What
  has the name and is no file (a link, a pipe, a directory) is left alone.
- the directory is gone: its writer goes on in the deleted file until the hour ends; what it writes
  there is read, and ``problem`` says so.

How far was read is kept in a position file, written before the lines are handed over: a sidecar
that comes back reads what was written meanwhile, and never a line twice. Killed in between it loses
the lines of one round. Without a position it starts at the end: what was there before is not its.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from servoscope.sidecar.sources.position import Mark, PositionFile

__all__ = ["FILE_NAME", "Tail"]

FILE_NAME = re.compile(r"sglang-request-metrics-\d{8}_\d{2}\.log")
_READ_BYTES = 256 * 1024
_ROUND_BYTES = 4 * 1024 * 1024  # of lines handed over at once
_MAX_LINE_BYTES = 8 * 1024 * 1024  # a prompt of a million token ids
_HEAD_BYTES = 256
_LAST_BYTES = 64  # before the offset: other ones there mean another content
_MAX_FILES = 200  # the newest by name that are looked at: eight days of hours
_MAX_OPEN = 8
_QUIET_ROUNDS = 240  # without growth: an old file is let go


@dataclass(slots=True)
class _File:
    """One file that is open. ``offset`` is behind the last whole line that was handed over."""

    name: str
    descriptor: int
    device: int
    inode: int
    offset: int
    rest: bytearray = field(default_factory=bytearray)  # read, and no newline yet
    skipping: bool = False  # within a line that is too long
    quiet: int = 0
    last: bytes = b""  # what stood before ``offset``

    def mark(self) -> Mark:
        """Where it was read to, and how to know it again: an inode number is used again."""
        size = min(self.offset, _HEAD_BYTES)
        return Mark(self.name, self.inode, self.offset, size, self.head(size))

    def go_to(self, offset: int) -> None:
        """Read on from there; what is left of a line that begins before it is passed over."""
        self.offset = offset
        self.last = self.look_back()
        self.skipping = bool(self.last) and not self.last.endswith(b"\n")

    def look_back(self) -> bytes:
        """What stands before ``offset`` now."""
        size = min(self.offset, _LAST_BYTES)
        return os.pread(self.descriptor, size, self.offset - size)

    def head(self, size: int) -> int:
        """A check sum of its first bytes."""
        return zlib.crc32(os.pread(self.descriptor, size, 0)) if size else 0


class Tail:
    """``directory`` must be absolute; ``position`` is ``None`` to remember nothing."""

    def __init__(
        self,
        directory: Path,
        position: PositionFile | None = None,
        *,
        max_line_bytes: int = _MAX_LINE_BYTES,
        round_bytes: int = _ROUND_BYTES,
    ) -> None:
        self.directory = directory
        self._position = position
        self._max_line_bytes = max_line_bytes
        self._round_bytes = round_bytes
        self._open: dict[tuple[int, int], _File] = {}  # by device and inode
        self._known: dict[str, tuple[int, int, int]] = {}  # name -> device, inode, size when closed
        self._started = False
        self._changed = False
        self.problem = ""  # why nothing (more) can be read, in words
        self.behind = False  # there was more than one round may hand over
        self.drops: Counter[str] = Counter()  # oversize_line, truncated_file, unreadable_file
        self._unreadable: dict[str, str] = {}  # name -> why
        self.bytes_read = 0

    def poll(self, *, look: bool = True) -> list[bytes]:
        """Whole lines that were written since the last call, without their ends.

        ``look``: also look for other files; the open ones are always read. Never raises OSError:
        see ``problem``.
        """
        if look or not self._started:
            self._look()
        lines: list[bytes] = []
        room = self._round_bytes
        self.behind = False
        for file in sorted(self._open.values(), key=lambda f: f.name):
            if room <= 0:
                self.behind = True
                break
            room -= self._read(file, lines, room)
            self.behind = self.behind or room <= 0
        if self._changed:
            self._save()
        return lines

    def files_open(self) -> list[str]:
        """Names of the files that are held."""
        return sorted(file.name for file in self._open.values())

    def close(self) -> None:
        """Let go of all files."""
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()
        if self._position is not None:
            self._position.close()

    # ---- which files ---------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            found = list(_entries(self.directory))
        except OSError as error:
            hint = (
                "; its writer cannot begin the next hour: make it again"
                if isinstance(error, FileNotFoundError)
                else "; let this sidecar's user read it"
            )
            self.problem = f"{self.directory}: {error.strerror or error}{hint}"
            return
        self.problem = ""
        if not self._started:
            self._begin(found)
        for name, status in found:
            ident = (status.st_dev, status.st_ino)
            known = self._known.get(name)
            if ident in self._open:
                continue
            if known is not None and known[:2] == ident and known[2] == status.st_size:
                continue
            again = known is not None and known[:2] == ident and known[2] < status.st_size
            self._add(name, known[2] if again and known is not None else 0)
        self._let_go(found)
        if found and (why := self._unreadable.get(found[-1][0])):
            self.problem = why

    def _begin(self, found: list[tuple[str, os.stat_result]]) -> None:
        """The first look: go on where an earlier life stopped, else at the end of everything."""
        self._started = self._changed = True
        marks = self._position.load() if self._position is not None else None
        marked = {mark.name: mark for mark in marks or ()}
        newest = max(marked, default="")
        for name, status in found:
            mark = marked.get(name)
            if mark is not None and mark.inode == status.st_ino:
                self._resume(marked.pop(name), name)
            elif marks is None or (mark is None and name <= newest):
                self._known[name] = (status.st_dev, status.st_ino, status.st_size)
        for mark in list(marked.values()):
            if (moved := self._renamed(mark)) is not None:
                self._resume(mark, moved)
        if marks is None and found:  # hold the newest: it may be rotated before it grows
            name, status = found[-1]
            self._add(name, status.st_size)

    def _resume(self, mark: Mark, name: str) -> None:
        """Open the file of a mark; one that only has its inode, or was cut, is new."""
        file = self._add(name, 0)
        if file is None:
            return
        file.name = mark.name
        size = os.fstat(file.descriptor).st_size
        if size >= mark.offset and file.head(mark.head_bytes) == mark.head:
            file.go_to(mark.offset)
        else:
            self.drops["truncated_file"] += 1

    def _renamed(self, mark: Mark) -> str | None:
        """A rotated file keeps its inode and mostly the beginning of its name."""
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    same = entry.name.startswith(mark.name) and entry.inode() == mark.inode
                    if same and entry.name != mark.name:
                        return entry.name
        except OSError:
            return None
        return None

    def _add(self, name: str, offset: int) -> _File | None:
        try:
            # Not what a link points to, and never blocking on a pipe that took the name.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.directory / name, flags)
        except OSError as error:
            if name not in self._unreadable:
                self.drops["unreadable_file"] += 1
            self._unreadable[name] = f"{self.directory / name}: {error.strerror or error}"
            return None
        self._unreadable.pop(name, None)
        status = os.fstat(descriptor)
        ident = (status.st_dev, status.st_ino)
        if ident in self._open:
            os.close(descriptor)
            return self._open[ident]
        if status.st_size < offset:
            offset = 0
            self.drops["truncated_file"] += 1
        file = self._open[ident] = _File(name, descriptor, *ident, 0)
        file.go_to(offset)
        self._changed = True
        return file

    def _let_go(self, found: list[tuple[str, os.stat_result]]) -> None:
        """Close what is read to its end and will not grow: not the newest, and long quiet."""
        present = {(s.st_dev, s.st_ino) for _, s in found}
        newest = max(self._open.values(), key=lambda f: f.name, default=None)
        crowd = len(self._open) - _MAX_OPEN
        for file in sorted(self._open.values(), key=lambda f: (-f.quiet, f.name)):
            if file is newest or not file.quiet:
                continue
            if file.quiet < _QUIET_ROUNDS and crowd <= 0:
                continue
            crowd -= 1
            os.close(file.descriptor)
            del self._open[file.device, file.inode]
            if (file.device, file.inode) in present:
                self._known[file.name] = (file.device, file.inode, file.offset)
            self._changed = True
        names = {name for name, _ in found}
        for table in (self._known, self._unreadable):
            for name in [n for n in table if n not in names]:
                del table[name]

    # ---- reading -------------------------------------------------------------------------------

    def _read(self, file: _File, lines: list[bytes], room: int) -> int:
        """Append whole lines of one file; returns how many bytes were taken."""
        taken = 0
        try:
            size = os.fstat(file.descriptor).st_size
            end = file.offset + (0 if file.skipping else len(file.rest))
            if size < end or file.look_back() != file.last:
                file.offset, file.skipping = 0, False
                file.rest.clear()
                self.drops["truncated_file"] += 1
            while taken < room:
                at = file.offset + len(file.rest)
                data = os.pread(file.descriptor, _READ_BYTES, at)
                if not data:
                    break
                taken += len(data)
                self._split(file, data, lines)
            if taken:
                file.last = file.look_back()
        except OSError as error:
            self.problem = f"{self.directory / file.name}: {error.strerror or error}"
        file.quiet = 0 if taken else file.quiet + 1
        self.bytes_read += taken
        return taken

    def _split(self, file: _File, data: bytes, lines: list[bytes]) -> None:
        before = file.offset
        file.rest += data
        *whole, rest = bytes(file.rest).split(b"\n")
        for line in whole:
            file.offset += len(line) + 1
            if file.skipping:
                file.skipping = False  # the end of the one that was too long
            elif len(line) > self._max_line_bytes:
                self.drops["oversize_line"] += 1
            elif line.strip():
                lines.append(line)
        if file.skipping or len(rest) > self._max_line_bytes:
            if not file.skipping:
                self.drops["oversize_line"] += 1
            file.skipping = True
            file.offset += len(rest)
            rest = b""
        file.rest = bytearray(rest)
        self._changed = self._changed or file.offset != before

    def _save(self) -> None:
        self._changed = False
        if self._position is not None:
            self._position.save([file.mark() for file in self._open.values()])


def _entries(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The newest request files by name, oldest first."""
    with os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if FILE_NAME.fullmatch(e.name))
    for name in names[-_MAX_FILES:]:
        try:
            status = os.lstat(directory / name)
        except FileNotFoundError:
            continue  # rotated away meanwhile
        if stat.S_ISREG(status.st_mode):
            yield name, status

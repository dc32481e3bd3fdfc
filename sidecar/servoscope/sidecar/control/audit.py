"""The record of who changed which knob: append-only JSON lines, mode 0600, synced to disk.

A change that cannot be written down is not made: ``append`` raises AuditError and the control API
refuses. The directory is the state directory, shared by this user's sidecars. Nothing here deletes
or rewrites a line; only a piece of one that did not fit on the disk is taken back.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["AuditError", "AuditLog"]

_MAX_LINE_BYTES = 64 * 1024


class AuditError(OSError):
    """The audit file cannot be written; the text says which file and why."""


class AuditLog:
    """Appends to one file."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line and wait until it is on disk. Raises AuditError."""
        line = json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n"
        if len(line) > _MAX_LINE_BYTES:
            raise AuditError(f"{self.path}: an entry of {len(line)} bytes is too long")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
                size = self._check(descriptor, len(line))
                written = os.write(descriptor, line)
                if written != len(line):
                    # The disk is full. A piece of a line would spoil the next one too.
                    os.ftruncate(descriptor, size)
                    raise AuditError(f"{self.path}: only {written} bytes could be written")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except AuditError:
            raise
        except OSError as error:
            raise AuditError(f"{self.path}: {error.strerror or error}") from error

    def _check(self, descriptor: int, more: int) -> int:
        """Size of the file before. Raises AuditError when nothing may be added."""
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AuditError(f"{self.path} is not a regular file")
        if found.st_size + more > self._max_bytes:
            raise AuditError(
                f"{self.path} has {found.st_size} bytes, the limit is {self._max_bytes}: "
                f"move it away, then changes are possible again"
            )
        return found.st_size

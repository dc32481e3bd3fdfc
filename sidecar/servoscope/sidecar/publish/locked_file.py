"""A file that one process alone appends to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["append_whole", "locked_file"]


def locked_file(path: Path) -> BinaryIO:
    """``path``, made when missing (mode 0600), for this process alone until it is closed.

    To be read as a file, and written by its descriptor. Raises OSError in words.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.fdopen(os.open(path, flags, 0o600), "rb")
    try:
        why = _why_not(path, file.fileno())
    except OSError as error:
        why = str(error)
    if why is None:
        return file
    file.close()
    raise OSError(f"{path} {why}")


def _why_not(path: Path, descriptor: int) -> str | None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to uid {found.st_uid}"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "is in use by another sidecar"
    os.fchmod(descriptor, 0o600)
    if path.lstat().st_ino != found.st_ino:  # its holder has put a new one in its place
        return "was replaced meanwhile"
    return None


def append_whole(descriptor: int, data: bytes, size: int) -> int:
    """Append ``data`` to a file of ``size`` bytes, or nothing; returns the new size.

    Raises OSError: a piece of a line would spoil the next one too, so it is taken back.
    """
    error: OSError | None = None
    try:
        written = os.write(descriptor, data)
    except OSError as caught:
        written, error = 0, caught
    if written == len(data):
        return size + written
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, size)
    raise error or OSError(f"only {written} of {len(data)} bytes could be written")

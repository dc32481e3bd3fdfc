"""How far a sidecar has read, on disk: small, whole or not there, and one sidecar's at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from servoscope.exporters.paths import private_directory
from servoscope.sidecar.publish.locked_file import locked_file

__all__ = ["Mark", "PositionFile"]

_VERSION = 1
_MAX_BYTES = 64 * 1024
_MAX_MARKS = 64
_MAX_HEAD_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Mark:
    """A file read up to ``offset``; ``head`` is a check sum of its first ``head_bytes`` bytes.

    No device: its number may be another after a boot.
    """

    name: str
    inode: int
    offset: int
    head_bytes: int
    head: int


class PositionFile:
    """The position of one server's request files in ``directory``.

    ``problem`` says why nothing is remembered, where that is so; reading goes on. ``what`` is the
    directory that is read: a position in another one is none.
    """

    def __init__(self, directory: Path, server: str, what: Path) -> None:
        self.path = directory / f"{server.replace('/', '_')}.json"
        self._what = str(what)
        self._lock: BinaryIO | None = None
        self.problem = ""

    def load(self) -> list[Mark] | None:
        """What was saved last, ``None`` when there is nothing to go on from."""
        try:
            private_directory(self.path.parent)
            self._lock = locked_file(self.path.with_suffix(".lock"))
            with self.path.open("rb") as file:
                told = json.loads(file.read(_MAX_BYTES))
            if told["version"] != _VERSION or told["directory"] != self._what:
                return None
            return [_mark(one) for one in told["files"][:_MAX_MARKS]]
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"the position is not kept: {error}"
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None  # spoiled: as if there were none

    def save(self, marks: Sequence[Mark]) -> None:
        """Replace what was saved. Needs ``load`` first; without its lock nothing is written."""
        if self._lock is None:
            return
        told = {
            "version": _VERSION, "directory": self._what, "files": [asdict(m) for m in marks],
        }  # fmt: skip
        fresh = self.path.with_suffix(".new")
        try:
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
                file.write(json.dumps(told).encode())
            fresh.replace(self.path)
        except OSError as error:
            self.problem = f"the position is not kept: {error}"
        else:
            self.problem = ""

    def close(self) -> None:
        """Let another sidecar have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _mark(told: object) -> Mark:
    """Raises TypeError, KeyError or ValueError for anything that is not one."""
    if not isinstance(told, dict) or not isinstance(told["name"], str) or "/" in told["name"]:
        raise TypeError("no mark")
    numbers = [told[n] for n in ("inode", "offset", "head_bytes", "head")]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError("no numbers")
    if max(numbers) >= 1 << 64 or told["head_bytes"] > _MAX_HEAD_BYTES:
        raise ValueError("no numbers of a file")
    return Mark(told["name"], *numbers)

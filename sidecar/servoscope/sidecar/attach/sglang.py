"""What the sidecar must know of an SGLang's processes to find its request files. Reads /proc."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from servoscope.exporters.sglang.settings import Settings, settings_of

if TYPE_CHECKING:
    from servoscope.sidecar.attach.target import Target

__all__ = ["EngineFiles", "EngineFilesOf", "engine_files"]


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Of one life of the engine: how it was started, and where its files are from here.

    ``told_directory`` is the engine's own name for ``directory``; ``others`` lists pids of other
    engines that write there (reads the process table).
    """

    settings: Settings
    told_directory: Path | None = None
    directory: Path | None = None
    others: Callable[[], list[int]] = list


class EngineFilesOf:
    """Remembers the answer for one life of the engine."""

    def __init__(self, target: Callable[[], Target]) -> None:
        self._target = target
        self._for: Target | None = None
        self._files: EngineFiles | None = None

    def __call__(self) -> EngineFiles:
        """For the engine as it is now."""
        target = self._target()
        if self._files is None or target is not self._for:
            self._for, self._files = target, engine_files(target)
        return self._files


def engine_files(target: Target) -> EngineFiles:
    """How ``target`` was started and where its request files are from here."""
    settings = settings_of(target.settings, target.argv)
    if settings.file_dir is None:
        return EngineFiles(settings)
    pid = next(iter(target.pids), None)
    told = _absolute(pid, settings.file_dir)
    if told is None:
        return EngineFiles(settings)
    seen = told if pid is None else _from_here(pid, told)
    return EngineFiles(settings, told, seen, partial(_others, seen, tuple(target.pids)))


def _absolute(pid: int | None, directory: str) -> Path | None:
    path = Path(directory)
    if path.is_absolute():
        return path
    if pid is None:
        return None
    try:
        return Path(os.path.normpath(Path(psutil.Process(pid).cwd()) / path))
    except (psutil.Error, OSError):
        return None


def _from_here(pid: int, path: Path) -> Path:
    """``path`` of another process: through its root where it has a file system of its own."""
    try:
        apart = Path(f"/proc/{pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
    except OSError:
        return path
    return Path(f"/proc/{pid}/root") / path.relative_to("/") if apart else path


def _others(directory: Path, own: Sequence[int]) -> list[int]:
    """Pids of other engines that were started with the same directory, where that can be seen."""
    try:
        wanted = directory.stat()
    except OSError:
        return []
    family = _family(own)
    found: list[int] = []
    for process in psutil.process_iter():
        if process.pid in family:
            continue
        try:
            argv = process.cmdline()
        except (psutil.Error, OSError):
            continue
        named = settings_of({}, argv).file_dir if any("sglang" in word for word in argv) else None
        if named is None or (path := _absolute(process.pid, named)) is None:
            continue
        try:
            status = _from_here(process.pid, path).stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(process.pid)
    return found


def _family(own: Sequence[int]) -> set[int]:
    """The engine's processes, and what started them with the same command line (a launcher)."""
    family = set(own)
    for pid in own:
        try:
            process = psutil.Process(pid)
            family.update(p.pid for p in process.parents())
            family.update(p.pid for p in process.children(recursive=True))
        except (psutil.Error, OSError):
            continue
    return family

"""The hook that makes the embedded engine's chunk live: built, preloaded, and talked to.

A C compiler is needed once, when the hook is asked for (``--live-chunk``), never without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from servoscope.exporters.paths import private_directory

__all__ = ["ChunkHook", "HookError", "build", "restart_preloaded"]

_SOURCE = "chunk_hook.c"
_BUILD_SECONDS = 60.0
_PRELOAD = "LD_PRELOAD"


class HookError(RuntimeError):
    """The hook cannot be had; the text says why and what to do."""


def build(directory: Path) -> Path:
    """The compiled hook in ``directory``, which nobody else may write to. Raises HookError."""
    source = (files("servoscope.lab.embedded") / _SOURCE).read_bytes()
    digest = hashlib.sha256(source + platform.machine().encode()).hexdigest()[:12]
    library = private_directory(directory) / f"chunk_hook-{digest}.so"
    if library.is_file():
        return library
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if not compiler or shutil.which(compiler[0]) is None:
        raise HookError(
            f"a live chunk needs a C compiler, once, and there is no {compiler[0] or 'cc'!r} here: "
            "install one (Debian: gcc and libc6-dev; another by the variable CC), "
            "or start without --live-chunk"
        )
    partial = library.with_suffix(f".{os.getpid()}.partial")
    text = partial.with_suffix(".c")
    command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(partial), str(text), "-ldl"]
    try:
        text.write_bytes(source)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
        if done.returncode != 0:
            raise HookError(
                f"{compiler[0]} could not build the hook of the live chunk; start without "
                f"--live-chunk, or mend it: {done.stderr.strip()[-600:]}"
            )
        partial.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HookError(f"the hook of the live chunk was not built: {error}") from error
    finally:
        for left in (partial, text):
            left.unlink(missing_ok=True)
    return library


def restart_preloaded(directory: Path) -> NoReturn:
    """Start this program anew, in the same process, with the hook in front. Raises HookError."""
    library = build(directory)
    before = os.environ.get(_PRELOAD)
    environment = {**os.environ, _PRELOAD: f"{library}:{before}" if before else str(library)}
    os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - itself, no shell


class ChunkHook:
    """The hook in this process. Every method may be called from any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._set = library.servoscope_chunk_set
        self._set.argtypes, self._set.restype = (ctypes.c_uint32, ctypes.c_int64), None
        self._ask = {
            name: getattr(library, f"servoscope_chunk_{name}")
            for name in ("boot", "used", "asked", "asked_at_ns")
        }
        for ask, kind in zip(
            self._ask.values(),
            (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64),
            strict=True,
        ):
            ask.argtypes, ask.restype = (), kind

    @classmethod
    def preloaded(cls) -> ChunkHook | None:
        """The one that this process was started with, if it was."""
        everything = ctypes.CDLL(None)
        return cls(everything) if hasattr(everything, "servoscope_chunk_set") else None

    def set(self, tokens: int, until: float) -> None:
        """At most ``tokens`` a step until ``until`` (seconds of time.monotonic); 0: boot value."""
        self._set(tokens, int(until * 1e9))

    def boot(self) -> int:
        """Tokens a step as the engine was started; 0 before it first asked."""
        return int(self._ask["boot"]())

    def used(self) -> int:
        """Tokens that the last step was allowed."""
        return int(self._ask["used"]())

    def asked(self) -> int:
        """How often the engine has asked, which is once a step (and at its start)."""
        return int(self._ask["asked"]())

    def asked_at(self) -> float:
        """When it last did, in seconds of time.monotonic."""
        return float(self._ask["asked_at_ns"]()) / 1e9

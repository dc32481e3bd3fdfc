"""Which model and which version of it a server serves, from argv and from what it says of itself.

Pure, except that ``config_hash`` reads one file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["argument", "config_hash", "model_location", "model_version", "reported_version"]

_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_MAX_VERSION_CHARACTERS = 64
_REPORTED = ("weight_version", "model_sha", "sha", "revision")


def argument(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last ``--name VALUE`` or ``--name=VALUE`` in ``argv``."""
    found: str | None = None
    for i, word in enumerate(argv):
        for name in names:
            if word == name and i + 1 < len(argv):
                found = argv[i + 1]
            elif word.startswith(f"{name}="):
                found = word[len(name) + 1 :]
    return found


def model_location(argv: Sequence[str], root: str | None) -> str | None:
    """Directory, file or name of the model: from argv, else what /v1/models says is its root."""
    words = argv[argv.index("-m") + 2 :] if _is_python_module(argv) else argv
    named = argument(words, "--model", "--model-path", "-m")
    if named is None and "serve" in argv:
        after = argv[argv.index("serve") + 1 :]
        if after and not after[0].startswith("-"):
            named = after[0]
    return named or root


def _is_python_module(argv: Sequence[str]) -> bool:
    """``python -m package``: that -m names no model."""
    return bool(argv) and "python" in Path(argv[0]).name and "-m" in argv


def reported_version(*answers: Mapping[str, Any]) -> str | None:
    """A weight version or a model's sha, where an engine's own answers hold one."""
    for answer in answers:
        for key in _REPORTED:
            value = answer.get(key)
            if isinstance(value, str) and value and value != "default":
                return value
    return None


def config_hash(location: str | None, cwd: Path | None = None) -> str | None:
    """sha256[:12] of the model's config.json; of the first 4 MiB of a model file (GGUF).

    ``cwd`` is the working directory of the engine, for a relative location. ``None`` when there
    is nothing to read on this host (a model named by its hub id, another host, no permission).
    """
    if not location:
        return None
    path = Path(location)
    if not path.is_absolute():
        if cwd is None:
            return None
        path = cwd / path
    try:
        target = path / "config.json" if path.is_dir() else path
        if not target.is_file():
            return None
        with target.open("rb") as file:
            return hashlib.sha256(file.read(_MAX_CONFIG_BYTES)).hexdigest()[:12]
    except OSError:
        return None


def model_version(
    flag: str | None, argv: Sequence[str], reported: str | None, hashed: str | None
) -> str:
    """The version by precedence: flag, --revision, the engine's own word, the hash, ``unknown``."""
    for candidate in (flag, argument(argv, "--revision"), reported, hashed):
        if candidate:
            return candidate[:_MAX_VERSION_CHARACTERS]
    return "unknown"

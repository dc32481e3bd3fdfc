"""The bearer token of the control API: one file of the state directory, readable by its user only.

The path is what tells a client where to read it; the token itself is never logged or served.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

__all__ = ["TokenError", "load_token", "matches", "read_token"]

_BYTES = 32
_MAX_FILE_BYTES = 4096


class TokenError(Exception):
    """The token file cannot be used; the text names it and says what to do."""


def load_token(path: Path) -> str:
    """The token in ``path``, made when missing. Raises TokenError when others can read it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            return read_token(path)
        token = secrets.token_urlsafe(_BYTES)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
    except OSError as error:
        raise TokenError(f"{path}: {error.strerror or error}") from error
    return token


def read_token(path: Path) -> str:
    """The token in an existing file. Raises TokenError when others can read it, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (os.geteuid(), 0):
            raise TokenError(f"{path} belongs to uid {found.st_uid}; remove it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise TokenError(f"{path} can be read by others; run: chmod 600 {path}")
        token = file.read(_MAX_FILE_BYTES).strip()
    if not token:
        raise TokenError(f"{path} is empty; remove it and a new one is made")
    return token


def matches(token: str, header: str | None) -> bool:
    """Whether an Authorization header carries ``token``, in constant time."""
    scheme, _, given = (header or "").partition(" ")
    # aiohttp hands over bytes that are no UTF-8 as lone surrogates; no token holds one.
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
    return scheme.lower() == "bearer" and right

"""Where state and sockets live. Standard library only: the in-engine plug-in uses it too.

State: ``$SERVOSCOPE_STATE``, else /var/lib/servoscope as root, else ~/.local/state/servoscope.
Runtime: ``$SERVOSCOPE_RUN_DIR``, else /run/servoscope as root, else $XDG_RUNTIME_DIR/servoscope,
else /tmp/servoscope-<uid> (a shell without a session has no runtime directory).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["RUN_DIR_VARIABLE", "STATE_DIR_VARIABLE", "private_directory", "run_dir", "state_dir"]

RUN_DIR_VARIABLE = "SERVOSCOPE_RUN_DIR"
STATE_DIR_VARIABLE = "SERVOSCOPE_STATE"


def state_dir(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """Directory of database, spool, audit and token for a user with this environment."""
    env = os.environ if environ is None else environ
    if named := env.get(STATE_DIR_VARIABLE):
        return Path(named)
    if (os.geteuid() if uid is None else uid) == 0:
        return Path("/var/lib/servoscope")
    home = env.get("HOME") or str(Path("~").expanduser())
    return Path(home) / ".local" / "state" / "servoscope"


def run_dir(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """Directory of sockets and ``sidecars/<server>.json`` for a user with this environment."""
    env = os.environ if environ is None else environ
    user = os.geteuid() if uid is None else uid
    if named := env.get(RUN_DIR_VARIABLE):
        return Path(named)
    if user == 0:
        return Path("/run/servoscope")
    if runtime := env.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "servoscope"
    return Path(f"/tmp/servoscope-{user}")  # noqa: S108 - owner and mode are checked on use


def private_directory(path: Path) -> Path:
    """Make ``path`` (mode 0700) and return it.

    Raises PermissionError when it exists and belongs to another user, or others may write to it:
    a socket in such a directory could be another user's.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to uid {found.st_uid}, not to this user")
    if stat.S_IMODE(found.st_mode) & 0o002:
        raise PermissionError(f"{path} is writable by everybody; chmod o-w it")
    return path

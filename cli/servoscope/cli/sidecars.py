"""Finding the sidecar of a server on this host, and talking to its control API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servoscope.cli.servers import one_url, server_of
from servoscope.exporters.cpu import same_process
from servoscope.exporters.paths import run_dir

__all__ = ["Registered", "SidecarAnswer", "find_sidecar", "registered_sidecars", "request"]

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Registered:
    """One file of ``sidecars/`` in the runtime directory whose process is alive."""

    server: str
    pid: int
    url: str
    token_path: Path | None


@dataclass(frozen=True, slots=True)
class SidecarAnswer:
    """Status and JSON body of an answer."""

    status: int
    body: Mapping[str, Any]


def registered_sidecars(directory: Path | None = None) -> list[Registered]:
    """All sidecars of this user (or this runtime directory) that are alive."""
    found = []
    folder = (directory or run_dir()) / "sidecars"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            pid = int(entry["pid"])
            url = str(entry.get("url") or f"http://127.0.0.1:{int(entry['port'])}")
            server = str(entry.get("server") or path.stem.replace("_", ":"))
            token = entry.get("token_path")
            if not same_process(pid, float(entry["start_seconds"])):
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written or left by a dead sidecar: it overwrites or we ignore
        found.append(Registered(server, pid, url, Path(token) if token else None))
    return found


def find_sidecar(url: str, directory: Path | None = None) -> Registered | None:
    """The live sidecar of the server at ``url``, if there is one. Raises ValueError: no URL."""
    wanted = {server_of(url), server_of(one_url(url))}
    return next((s for s in registered_sidecars(directory) if s.server in wanted), None)


def request(sidecar: Registered, path: str, body: Mapping[str, Any] | None = None) -> SidecarAnswer:
    """GET, or POST with the token when there is a body. Raises OSError when nothing answers."""
    headers = {"Accept": "application/json"}
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
        if sidecar.token_path is not None:
            token = sidecar.token_path.read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
    call = urllib.request.Request(sidecar.url + path, data=data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    try:
        with opener.open(call, timeout=TIMEOUT_SECONDS) as answer:
            return SidecarAnswer(answer.status, json.loads(answer.read(4 << 20)))
    except urllib.error.HTTPError as error:
        try:
            return SidecarAnswer(error.code, json.loads(error.read(1 << 20)))
        except ValueError:
            return SidecarAnswer(error.code, {"error": str(error)})

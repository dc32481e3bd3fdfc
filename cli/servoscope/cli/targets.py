"""The file of targets for Prometheus' ``file_sd_configs``, shared by every ``up`` of this user.

Sidecars come from their registrations. Collectors have none, so the ones of other ``up`` are read
from the file itself and kept while somebody listens there. Each writer rewrites the whole every
few seconds, so that a lost update or what a killed one left behind is put right soon.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from servoscope.cli.sidecars import registered_sidecars
from servoscope.exporters.paths import state_dir

__all__ = ["file_sd_path", "groups_of", "read_collectors", "write_targets"]

SIDECAR_JOB = "servoscope-sidecar"
COLLECTOR_JOB = "servoscope-collector"
MAX_COLLECTORS = 16  # of one file; a spoilt one must not make us connect for ever
CONNECT_SECONDS = 0.5


def file_sd_path() -> Path:
    """Where ``up`` writes its targets for Prometheus."""
    return state_dir() / "prometheus-targets.json"


def groups_of(sidecars: Iterable[str], collectors: Iterable[str]) -> list[dict[str, Any]]:
    """Target groups of ``host:port`` addresses, a group each; sidecars first."""
    return [
        {"targets": [address], "labels": {"job": job}}
        for job, addresses in ((SIDECAR_JOB, sidecars), (COLLECTOR_JOB, collectors))
        for address in dict.fromkeys(addresses)
    ]


def read_collectors(text: str) -> list[str]:
    """Addresses of the collectors in the text of such a file; a spoilt file has none."""
    try:
        groups = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found: list[str] = []
    for group in groups if isinstance(groups, list) else []:
        if not isinstance(group, dict) or group.get("labels") != {"job": COLLECTOR_JOB}:
            continue
        targets = group.get("targets")
        found += [t for t in (targets if isinstance(targets, list) else []) if isinstance(t, str)]
    return list(dict.fromkeys(found))[:MAX_COLLECTORS]


def write_targets(collector: str, *, leaving: bool = False) -> None:
    """Write all sidecars and collectors that live now, ``collector`` (``host:port``) last.

    ``leaving``: ours has ended; without anything else the file is removed. Raises OSError.
    """
    path = file_sd_path()
    try:
        known = read_collectors(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        known = []
    collectors = [c for c in known if c != collector and _listens(c)]
    if collector and (not leaving or _listens(collector)):
        collectors.append(collector)
    sidecars = [s.url.removeprefix("http://") for s in registered_sidecars()]
    groups = groups_of(sidecars, collectors)
    if not groups:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(groups, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return True
    except (OSError, ValueError, OverflowError):
        return False

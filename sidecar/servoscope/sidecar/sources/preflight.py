"""What a sidecar was explicitly asked for must be possible, or it does not start."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from servoscope.sidecar.tap.source import tap_missing

if TYPE_CHECKING:
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.config import SidecarConfig

__all__ = ["insist"]


def insist(config: SidecarConfig, target: Target) -> None:
    """Raises PermissionError when the tap is asked for (``tap: on``) and cannot be had, OSError
    when the relay's or the OTLP receiver's address cannot be listened on; the text says what to do
    next."""
    if config.tap == "on":
        pid = next(iter(target.pids), None)
        if (missing := tap_missing(target.host, target.port, pid)) is not None:
            raise PermissionError(f"the tap was asked for (tap: on), but {missing}")
    if config.relay is not None:
        _require_free("relay", *config.relay_address())
    if config.otlp is not None and target.engine == "sglang":
        _require_free("otlp", *config.otlp_address())


def _require_free(what: str, host: str, port: int) -> None:
    """It would be tried again for ever: right for a port lost later, wrong at the start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        known = (error.errno or 0) > 0  # a name that does not resolve has a negative one
        why = os.strerror(error.errno or 0) if known else error.strerror or str(error)
        raise OSError(
            f"{what}: cannot listen on {host}:{port}: {why}. "
            f"Name a free address: --{what} HOST:PORT"
        ) from error

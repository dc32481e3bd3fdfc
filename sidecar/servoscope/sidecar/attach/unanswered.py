"""Why an HTTP server did not answer, in a few words."""

from __future__ import annotations

import os
import socket

import aiohttp

__all__ = ["reason_of"]


def reason_of(error: Exception) -> str:
    """``Connection refused`` and its like, without the client's own words for the address."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    is_certificate = isinstance(error, aiohttp.ClientSSLError)
    if isinstance(error, aiohttp.ClientConnectorError) and not is_certificate:
        cause = error.os_error
        if isinstance(cause, socket.gaierror):
            return f"no address for this name: {cause.strerror or cause}"
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
    return str(error) or type(error).__name__

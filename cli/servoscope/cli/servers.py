"""Servers by URL: however people write its address, a server of this host has one name."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

import psutil

from servoscope.sidecar.attach.canonical import locate, parts_of_url, server_label

__all__ = ["one_url", "server_of", "unique_servers"]


def server_of(url: str) -> str:
    """``host:port`` of a URL, as written. Raises ValueError, which quotes what is no URL."""
    _, host, port = parts_of_url(url)
    return server_label(host, port)


def one_url(url: str) -> str:
    """``url`` with the address by which its sidecar knows the server. Looks at this host.

    Unchanged for other hosts, for what nobody here listens on, for https (its certificate is for
    the name that was written) and for what is no URL.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
        if parts.scheme != "http" or not host:
            return url
        place = locate(host, port)
    except (ValueError, OSError, psutil.Error):
        return url
    if place.host == host:
        return url
    return urlunsplit(parts._replace(netloc=server_label(place.host, port)))


def unique_servers(urls: Iterable[str]) -> list[str]:
    """The servers of ``urls``, each once, in order. Raises ValueError for what is no URL."""
    return list({server_of(url): url for url in map(one_url, urls)}.values())

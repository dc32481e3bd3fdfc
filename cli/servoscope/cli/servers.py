"""One server, one name: however people write its address, it has one sidecar.

``localhost``, ``127.0.0.1``, ``[::1]`` and this host's own names can all be the same listening
process. Which are is read from the sockets that listen; nothing is asked over the network but,
for a name, its address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit, urlunsplit

import psutil

from servoscope.sidecar.attach.processes import is_local, listeners

__all__ = ["main_address", "one_url", "server_of", "unique_servers"]

DEFAULT_PORTS = {"http": 80, "https": 443}
LOOPBACKS = ("127.0.0.1", "::1")
CONNECT_SECONDS = 0.5

Socket = tuple[str, int | None]  # address and owner; None: another user's


def server_of(url: str) -> str:
    """``host:port`` of a URL, as written. Raises ValueError when it is none."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if not parts.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port or DEFAULT_PORTS.get(parts.scheme, 80)}"


def one_url(url: str) -> str:
    """``url`` with the address by which the server behind it is known. Looks at this host.

    Unchanged for other hosts, for what nobody here listens on, for https (its certificate is for
    the name that was written) and for what is no URL.
    """
    try:
        server_of(url)
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS["http"]
        addresses = _addresses_of(host, port) if parts.scheme == "http" else []
        sockets = _sockets(port) if addresses else []
    except (ValueError, OSError, psutil.Error):
        return url
    served = [a for a in addresses if any(_covers(listening, a) for listening, _ in sockets)]
    if not served:
        return url
    known = main_address(served[0], sockets)
    shown = f"[{known}]" if ":" in known else known
    return urlunsplit(parts._replace(netloc=f"{shown}:{port}"))


def main_address(address: str, sockets: Sequence[Socket]) -> str:
    """The address for the server that answers at ``address``: a loopback one where it has one.

    Args:
        address: one of this host.
        sockets: what listens on the port in question. ``::`` stands for IPv6 alone: a socket that
            takes IPv4 too is to be given as ``0.0.0.0`` as well.
    """
    answering = [one for one in sockets if _covers(one[0], address)]
    if not answering:
        return address
    owners = {owner for _, owner in answering if owner is not None}
    theirs = answering + [one for one in sockets if one[1] in owners]
    for loopback in LOOPBACKS:
        if any(_covers(listening, loopback) for listening, _ in theirs):
            return loopback
    return min((one for one, _ in theirs if _is_plain(one)), default=address)


def _addresses_of(host: str, port: int) -> list[str]:
    """Addresses of this host that ``host`` stands for, loopback first; none: another host's."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    plain = {str(_plain(str(info[4][0]))) for info in found}
    local = [one for one in plain if _plain(one).is_unspecified or is_local(one)]
    return sorted(local, key=lambda one: (one not in LOOPBACKS, ":" in one, one))


def _sockets(port: int) -> list[Socket]:
    found = [(one.host, one.pid) for one in listeners() if one.port == port]
    both = [
        ("0.0.0.0", owner)
        for host, owner in found
        if host == "::" and not any(_covers(other, LOOPBACKS[0]) for other, _ in found)
    ]
    # Whether a socket on :: takes IPv4 too is not shown anywhere: it is tried.
    return [*found, *both] if both and _takes_ipv4(port) else found


def _takes_ipv4(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection((LOOPBACKS[0], port), CONNECT_SECONDS),
    ):
        return True
    return False


def _covers(listening: str, address: str) -> bool:
    """Whether a socket that listens there answers at ``address``."""
    try:
        ours, asked = _plain(listening), _plain(address)
    except ValueError:
        return False
    if asked.is_unspecified:  # to connect there is to connect to loopback
        asked = ipaddress.ip_address(LOOPBACKS[asked.version == 6])
    return ours.version == asked.version and (ours.is_unspecified or ours == asked)


def _is_plain(text: str) -> bool:
    """An address that is good by itself: without a zone."""
    try:
        return str(ipaddress.ip_address(text)) == text and "%" not in text
    except ValueError:
        return False


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def unique_servers(urls: Iterable[str]) -> list[str]:
    """The servers of ``urls``, each once, in order. Raises ValueError for what is no URL."""
    return list({server_of(url): url for url in map(one_url, urls)}.values())

"""One name for one server: ``localhost``, ``[::1]``, ``127.0.0.1`` and this host's own addresses
may all lead to the same listening sockets, and must not make two sidecars.

A server that 127.0.0.1 reaches too is called 127.0.0.1; one that listens elsewhere on this host is
called by the address it listens on; one that is not on this host, as it was typed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from servoscope.sidecar.attach.processes import Listener, is_local, listeners

__all__ = ["Place", "canonical", "locate", "parts_of_url", "server_label"]

LOOPBACK, LOOPBACK6 = "127.0.0.1", "::1"
_ANY, _ANY6 = "0.0.0.0", "::"
_KNOCK_SECONDS = 1.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is. ``pids`` own its sockets; empty: not on this host, or not seen."""

    host: str
    pids: frozenset[int] = frozenset()


def parts_of_url(url: str) -> tuple[str, str, int]:
    """(scheme, host, port) of what a user typed; ``localhost`` is 127.0.0.1, a path is left out.

    Raises ValueError, which quotes the URL (never a password in it).
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port, named = parts.hostname, parts.port, parts.username is not None
    except ValueError as error:
        raise ValueError(f"{url.rpartition('@')[2]!r} is not a URL: {error}") from error
    if named:
        raise ValueError(
            "the URL holds a user name or a password, and we send none: leave it out, "
            "e.g. http://127.0.0.1:8000"
        )
    if parts.scheme not in _DEFAULT_PORTS or not host or host.isdigit():
        raise ValueError(f"{url!r} is not an http URL such as http://127.0.0.1:8000")
    host = LOOPBACK if host == "localhost" else host
    return parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme]


def server_label(host: str, port: int) -> str:
    """The ``server`` label: host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical(
    addresses: Iterable[str], found: Sequence[Listener], takes_ipv4: Callable[[], bool]
) -> Place | None:
    """The place of the server that one of ``addresses`` reaches, by what listens on its port.

    ``found``: the listeners of that port; ``takes_ipv4``: whether 127.0.0.1 is answered on the
    port, asked only where a socket on ``::`` may or may not take IPv4 too. ``None`` when nothing
    listens on any of the addresses.
    """
    sockets: dict[str, set[int]] = {}
    for listener in found:
        owners = sockets.setdefault(_plain(listener.host), set())
        if listener.pid is not None:
            owners.add(listener.pid)
    own = {_reached(address) for address in addresses}
    v4_elsewhere = LOOPBACK in sockets or _ANY in sockets
    dual = _ANY6 in sockets and not v4_elsewhere and takes_ipv4()
    usual = _serving(LOOPBACK, sockets, dual=dual)
    served = {a: bound for a in sorted(own) if (bound := _serving(a, sockets, dual=dual))}
    for bound in served.values():
        if usual is not None and (bound == usual or sockets[bound] & sockets[usual]):
            return Place(LOOPBACK, frozenset(sockets[bound] | sockets[usual]))
    for address, bound in served.items():
        return Place(address, frozenset(sockets[bound]))
    return None


def locate(host: str, port: int) -> Place:
    """The place of the server at ``host``:``port``. Reads this host's sockets: blocking."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port)}
    except (OSError, UnicodeError):
        return Place(host)
    wildcard = any(_plain(address) in (_ANY, _ANY6) for address in addresses)
    if not wildcard and not is_local(host):
        return Place(host)
    found = [listener for listener in listeners() if listener.port == port]
    place = canonical(addresses, found, lambda: _answers_ipv4(port))
    return Place(host) if place is None else place


def _answers_ipv4(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=_KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])  # a zone is not part of it
    return str(getattr(address, "ipv4_mapped", None) or address)


def _reached(address: str) -> str:
    """Connecting to the wildcard address is connecting to loopback."""
    plain = _plain(address)
    return {_ANY: LOOPBACK, _ANY6: LOOPBACK6}.get(plain, plain)


def _serving(address: str, sockets: dict[str, set[int]], *, dual: bool) -> str | None:
    """The bound address whose socket takes connections to ``address``: the most exact one."""
    wildcards = (_ANY6,) if ":" in address else (_ANY, *((_ANY6,) if dual else ()))
    return next((bound for bound in (address, *wildcards) if bound in sockets), None)

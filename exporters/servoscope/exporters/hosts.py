"""Which ``Host`` a server of ours answers to: the guard against DNS rebinding. Standard library.

A web page cannot read another origin, but it can make its own name resolve to this host: the
browser then asks us in the page's name, and the page reads the answer. Such a request carries that
name in ``Host``. So names are answered only when they are known; an address is always answered,
because a page that was loaded from an address has that address and no name to point elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

__all__ = ["ANY", "host_allowed", "host_refused", "host_served", "known_hosts", "wrong_host"]

ANY = "*"  # in a list: every name
MAX_CHARACTERS = 300  # a name has at most 253, and a port
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\Z")


def host_served(header: str) -> str | None:
    """The host of a ``Host`` header: in lower case, without port, brackets and final dot.

    ``None`` for what is no ``host[:port]``.
    """
    if len(header) > MAX_CHARACTERS:
        return None
    text = header.strip(" \t").lower()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or not _is_port(rest) or _address(host) is None or ":" not in host:
            return None
        return host
    host, colon, port = text.partition(":")
    if not _is_port(colon + port):
        return None
    return host if _address(host) is not None else _name(host)


def host_allowed(header: str | None, allowed: Collection[str]) -> bool:
    """Whether to answer a request with this ``Host``.

    Args:
        header: as received; ``None`` where there was none, which no browser sends and HTTP/1.1
            forbids: not answered.
        allowed: names that are answered besides every address and ``localhost``; ``"*"`` for all.
            What ``known_hosts`` gives.
    """
    host = host_served(header) if header is not None else None
    if host is None:
        return False
    if ANY in allowed or host == "localhost" or _address(host) is not None:
        return True
    return any(host == host_served(name) for name in allowed)


def known_hosts(listen: str, configured: Iterable[str], host_name: str) -> frozenset[str]:
    """The names for ``host_allowed`` of a server that listens on ``listen``.

    Args:
        listen: an address or a name; with a name, that one is known.
        configured: names people gave.
        host_name: this host's own name; known, with and without its domain, where others can
            reach ``listen``. On loopback nobody needs it.
    """
    names = {*configured, listen}
    address = _address(listen.strip("[]").lower())
    if not (address.is_loopback if address is not None else listen.lower() == "localhost"):
        names |= {host_name, host_name.partition(".")[0]}
    known = {host for name in names if (host := host_served(name)) and _address(host) is None}
    return frozenset(known | {ANY} if ANY in names else known)


def wrong_host(text: str) -> str | None:
    """Why ``text`` cannot be in a list of allowed names; ``None`` when it can."""
    if text == ANY or _address(text.strip("[]").lower()) is not None:
        return None
    host = text.strip().lower().removesuffix(".")
    if host_served(text) == host:
        return None
    return f"{text[:80]!r} is not a host name without scheme and port, such as metrics.example.org"


def host_refused(header: str | None, setting: str) -> str:
    """What to tell a sender whose ``Host`` is not answered. ``setting``: where to allow it."""
    if header is None:
        return f"the request names no host; send one that {setting} knows"
    return f"{header[:80]!r} is not a name of this server; if it should be, add it to {setting}"


def _is_port(text: str) -> bool:
    """``""``, ``":"`` or ``":80"``."""
    return re.fullmatch(r"(?::[0-9]{0,5})?", text) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if "%" in host:  # a zone of IPv6 can be any text; browsers send none
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _name(host: str) -> str | None:
    host = host.removesuffix(".")
    return host if _NAME.match(host) else None

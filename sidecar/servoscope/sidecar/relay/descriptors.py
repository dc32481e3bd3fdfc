"""How many files and sockets this process may hold, and what of that the relay may use.

Shells hand out a soft limit of 1,024; a relayed connection takes two. Beyond the limit the kernel
drops new connections without a word to anybody, so the relay refuses before that, and counts.
"""

from __future__ import annotations

import resource

__all__ = ["RESERVED", "WANTED", "raise_limit", "relay_connections"]

WANTED = 8_192
RESERVED = 192  # for /metrics, the engine's sockets, the collector, polite refusals
_MOST_CONNECTIONS = 1_024


def raise_limit(wanted: int = WANTED) -> int:
    """Raise the soft limit to ``wanted``, or as far as the hard one lets us; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft >= ceiling:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    return ceiling


def relay_connections(limit: int) -> int:
    """Connections that the relay can carry within ``limit`` descriptors; at least one.

    A refused one takes a descriptor too, until its client has read the refusal: two of three
    descriptors are for relaying, the third for that.
    """
    return max(1, min(_MOST_CONNECTIONS, (limit - RESERVED) // 3))

"""Find the LLM servers of this host: listening sockets of likely processes, each asked once.

Only ports whose process looks like an LLM server are asked at all, so that a database or a web
page of somebody else never gets a request from us. Where the process cannot be seen (another
user's, another container's of the same pod) that cannot be told: such a port is asked once, on
loopback, unless its number says that it is no LLM server. A server of a kind that is known but
not supported yet is in the answer too, with ``supported`` false.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Collection, Sequence

import aiohttp
import psutil

from servoscope.sidecar.attach.processes import Listener, listeners
from servoscope.sidecar.attach.target import Target, describe, identify, split_url

__all__ = ["discover", "hidden_worth_asking", "looks_like_a_server", "worth_asking"]

_LIKELY = re.compile(
    r"python|vllm|sglang|llama|text-generation|tgi|tritonserver|trtllm|xllamacpp", re.IGNORECASE
)
_NEVER = re.compile(r"servoscope[ .]+(sidecar|collector|up|cli)|jupyter|ipykernel")
_PROBE_SECONDS = 3.0
_MAX_PORTS = 64
_SYSTEM_PORTS = range(1024)  # of services of the system, but for the two of the web
_WEB_PORTS = (80, 443)
#: Listeners that speak no HTTP, or are known to be something else: NFS, MySQL, RDP, PostgreSQL,
#: X11, CouchDB, Redis, Docker, ZooKeeper, etcd, Kafka, Elasticsearch, Prometheus, node exporter,
#: Alertmanager, kubelet, Memcached, MongoDB.
_OTHER_PORTS = frozenset({
    2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 5432, 5984, 6000, 6379, 9090, 9092, 9093, 9094,
    9100, 9200, 9300, 10248, 10250, 10255, 10256, 11211, 27017,
})  # fmt: skip
#: Collector, sidecars, relays that `up` starts: where ours are by default, also of other users.
_OWN_PORTS = (range(9780, 9782), range(9790, 9800), range(9880, 9890))
_LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": _LOOPBACK, "::": _LOOPBACK}


def looks_like_a_server(argv: Sequence[str]) -> bool:
    """Whether a command line could be an LLM server's."""
    line = " ".join(argv)
    return bool(_LIKELY.search(line)) and not _NEVER.search(line)


def worth_asking(found: Sequence[tuple[Listener, Sequence[str]]]) -> list[tuple[str, int]]:
    """(host, port) of the sockets to ask, each port once, bounded."""
    ports: dict[int, str] = {}
    for listener, argv in found:
        if listener.pid == os.getpid() or not looks_like_a_server(argv):
            continue
        host = _WILDCARDS.get(listener.host, listener.host)
        if listener.port not in ports or host == "127.0.0.1":
            ports[listener.port] = host
    return [(host, port) for port, host in ports.items()][:_MAX_PORTS]


def hidden_worth_asking(
    found: Sequence[Listener], known: Collection[int] = ()
) -> list[tuple[str, int]]:
    """(host, port) of listeners whose process cannot be seen, each port once, bounded.

    Loopback and wildcard addresses only; not the ports of ``known``, whose owner was seen.
    """
    ports: dict[int, str] = {}
    for listener in found:
        host = _own_address(listener.host)
        skipped = (
            listener.pid is not None
            or host is None
            or listener.port in known
            or (listener.port in _SYSTEM_PORTS and listener.port not in _WEB_PORTS)
            or listener.port in _OTHER_PORTS
            or any(listener.port in own for own in _OWN_PORTS)
        )
        if host is not None and not skipped and (listener.port not in ports or host == _LOOPBACK):
            ports[listener.port] = host
    return [(host, port) for port, host in ports.items()][:_MAX_PORTS]


def _own_address(host: str) -> str | None:
    """Where to ask a loopback or wildcard listener; ``None`` for any other address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified:
        return _LOOPBACK
    return str(address) if address.is_loopback else None


async def discover() -> list[Target]:
    """The servers that run on this host; of those of other users the processes stay unknown."""
    asked = await asyncio.to_thread(_likely_sockets)
    found = await asyncio.gather(*(_ask(host, port) for host, port in asked))
    return [target for target in found if target is not None]


def _likely_sockets() -> list[tuple[str, int]]:
    found = listeners()
    with_argv = []
    for listener in found:
        if listener.pid is None:
            continue
        try:
            with_argv.append((listener, psutil.Process(listener.pid).cmdline()))
        except psutil.Error:
            continue
    seen = {listener.port for listener in found if listener.pid is not None}
    return worth_asking(with_argv) + hidden_worth_asking(found, seen)


async def _ask(host: str, port: int) -> Target | None:
    base, host, port = split_url(f"http://[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            async with aiohttp.ClientSession(trust_env=False) as session:
                answers = await identify(session, base, thorough=False)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    if answers is None:
        return None
    return await asyncio.to_thread(describe, base, host, port, answers)

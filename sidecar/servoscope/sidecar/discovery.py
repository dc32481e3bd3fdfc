"""Find the LLM servers of this host: listening sockets of likely processes, each asked once.

Only ports whose process looks like an LLM server are asked at all, so that a database or a web
page of somebody else never gets a request from us. A server of a kind that is known but not
supported yet is in the answer too, with ``supported`` false.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence

import aiohttp
import psutil

from servoscope.sidecar.attach import Target, describe, identify, split_url
from servoscope.sidecar.processes import Listener, listeners

__all__ = ["discover", "looks_like_a_server", "worth_asking"]

_LIKELY = re.compile(
    r"python|vllm|sglang|llama|text-generation|tgi|tritonserver|trtllm|xllamacpp", re.IGNORECASE
)
_NEVER = re.compile(r"servoscope[ .]+(sidecar|collector|up|cli)|jupyter|ipykernel")
_PROBE_SECONDS = 3.0
_MAX_PORTS = 64
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


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


async def discover() -> list[Target]:
    """The servers that run on this host, as far as this user may see their processes."""
    asked = await asyncio.to_thread(_likely_sockets)
    found = await asyncio.gather(*(_ask(host, port) for host, port in asked))
    return [target for target in found if target is not None]


def _likely_sockets() -> list[tuple[str, int]]:
    with_argv = []
    for listener in listeners():
        if listener.pid is None:
            continue
        try:
            with_argv.append((listener, psutil.Process(listener.pid).cmdline()))
        except psutil.Error:
            continue
    return worth_asking(with_argv)


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

"""The collector of ``servoscope up``: one that runs already, or one of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from servoscope.cli.children import Child, Children
from servoscope.cli.scratch import StackError, free_port
from servoscope.collector.config import CollectorConfig

__all__ = ["Keeper"]

START_SECONDS = 60.0  # a bound on waiting, for the slowest of machines
POLL_SECONDS = 1.0
AWAY_SECONDS = 3.0  # a collector that was not ours is replaced when silent for longer
MAX_TAKEOVERS = 3


class Keeper:
    """Finds or starts the collector, asks it, and replaces one of somebody else that ends."""

    def __init__(
        self,
        config: CollectorConfig,
        http: aiohttp.ClientSession,
        children: Children,
        command: Callable[..., list[str]],
        *,
        say: Callable[[str], None],
        notices: list[str],
        stopping: asyncio.Event,
    ) -> None:
        self.url = ""
        self._config = config
        self._http = http
        self._children = children
        self._command = command
        self._say = say
        self._notices = notices
        self._stopping = stopping
        self._ours = False
        self._headers: dict[str, str] = {}
        if token := config.read_token():
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def address(self) -> str:
        """``host:port``; empty until there is one."""
        return self.url.removeprefix("http://")

    async def start(self) -> None:
        """The one that runs on the configured port, else one of our own. Raises StackError."""
        url = self._url(self._config.port)
        if await self._answers(url):
            self.url = url
            self._notices.append(f"using the collector that already runs at {url}")
            return
        await self._run(free_port(self._config.listen, self._config.port))

    async def start_apart(self, database: Path) -> None:
        """One of our own on ``database``: toy figures must not mix with real ones.

        Not on the usual port, where another ``up`` would take it for the real one.
        """
        port = self._config.port
        port = free_port(self._config.listen, port + 1 if port else 0)
        await self._run(port, "--database", str(database))

    async def watch(self) -> None:
        """Where the collector of somebody else ends: one of our own on the same port."""
        silent_since: float | None = None
        takeovers = 0
        while not self._ours and takeovers < MAX_TAKEOVERS:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            if await self._answers(self.url):
                silent_since = None
            elif silent_since is None:
                silent_since = now
            elif now - silent_since >= AWAY_SECONDS:
                takeovers += 1
                silent_since = None
                await self._take_over()

    async def overview(self, window_seconds: float) -> Mapping[str, Any] | None:
        """Its overview; ``None`` when it does not answer."""
        query = {"window_seconds": f"{window_seconds:g}"}
        try:
            async with self._http.get(
                f"{self.url}/api/v1/overview", params=query, headers=self._headers
            ) as got:
                if got.status != 200:
                    return None
                body: Mapping[str, Any] = await got.json()
                return body
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    def _url(self, port: int) -> str:
        host = self._config.listen.strip("[]")
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _run(self, port: int, *words: str) -> None:
        self.url = self._url(port)
        self._ours = True
        command = self._command("collector", "--port", str(port), *words)
        child = self._children.start("collector", command)
        self._say(f"collector  {self.url}")
        await self._until(child, lambda: self._answers(self.url))

    async def _until(self, child: Child, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await ready():
            if not child.alive:
                raise StackError(
                    f"the {child.name} ended at its start:\n{child.last_lines()}\nLog: {child.log}"
                )
            if time.monotonic() > deadline or self._stopping.is_set():
                raise StackError(f"the {child.name} did not answer. Log: {child.log}")
            await asyncio.sleep(0.1)

    async def _take_over(self) -> None:
        child = self._children.start(
            "collector", self._command("collector", "--port", str(self._config.port))
        )
        deadline = time.monotonic() + START_SECONDS
        while child.alive and time.monotonic() < deadline:
            if await self._answers(self.url):
                break
            await asyncio.sleep(0.1)
        # Another `up` may have been quicker: then ours ends on the taken port, and theirs is used.
        await asyncio.sleep(POLL_SECONDS)
        self._ours = child.alive
        if child.alive:
            self._notices.append("the collector ended; this is one of our own on the same port")
        elif await self._answers(self.url):
            self._children.forget(child)

    async def _answers(self, url: str) -> bool:
        try:
            async with self._http.get(f"{url}/api/v1/policy", headers=self._headers) as got:
                return got.status == 200 and "slo_digest" in await got.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False

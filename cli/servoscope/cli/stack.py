"""The parts that ``servoscope up`` runs together, and the loop that shows them.

Collector, one sidecar an engine, and, where no engine runs, the embedded one with a trace replayed
through the sidecar's relay. Everything is a process of its own except the replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import aiohttp
from rich.console import Console
from rich.live import Live

from servoscope.cli.children import Child, Children
from servoscope.cli.scratch import StackError, empty_database, free_port
from servoscope.cli.settings import Settings
from servoscope.cli.sidecars import Registered, registered_sidecars, server_of
from servoscope.cli.sources import source_lines
from servoscope.cli.targets import write_targets
from servoscope.cli.view import render
from servoscope.exporters.paths import private_directory, run_dir, state_dir
from servoscope.lab.embedded.server import EmbeddedEngine, EngineStartError
from servoscope.lab.replay import replay_sample
from servoscope.sidecar.attach.discovery import discover

__all__ = ["Stack", "StackError"]

START_SECONDS = 30.0
POLL_SECONDS = 1.0
PLAIN_SECONDS = 10.0  # between two prints where the output is no terminal
PLAIN_COLUMNS = 132
TARGETS_SECONDS = 3.0  # between two writes of the targets for Prometheus
AWAY_SECONDS = 3.0  # a collector that was not ours is replaced when silent for longer
MAX_TAKEOVERS = 3


class Stack:
    """Starts, shows and ends the parts."""

    def __init__(
        self,
        settings: Settings,
        out: TextIO,
        *,
        config_file: str | None,
        urls: tuple[str, ...],
        embedded: bool,
        window_seconds: float,
    ) -> None:
        self.settings = settings
        self.console = Console(file=out)
        if not self.console.is_terminal:
            self.console = Console(file=out, width=PLAIN_COLUMNS)
        self.config_file = config_file
        self.urls = urls
        self.embedded = embedded
        self.window_seconds = window_seconds
        self.children = Children(state_dir() / "logs")
        self.resources = contextlib.ExitStack()  # closed when the children have ended
        self.engine: EmbeddedEngine | None = None
        self.relay_url = ""
        self.collector_url = ""
        self.collector_is_ours = False
        self.servers: set[str] = set()  # host:port of the engines that this one shows
        self.notices: list[str] = []
        self.stopping = asyncio.Event()

    async def run(self, seconds: float | None) -> int:
        """Start all, show until the end, end all. Returns an exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stopping.set)
        tasks: list[asyncio.Task[Any]] = []
        try:
            private_directory(state_dir())
            private_directory(run_dir())
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=5), trust_env=False
            ) as http:
                engines = await self._engines()
                if engines:
                    await self._start_collector(http)
                    for url in engines:
                        self._start_sidecar(url)
                else:
                    await self._start_collector_for_embedded(http)
                    tasks.append(await self._start_embedded())
                await self._await_sidecars()
                await asyncio.to_thread(write_targets, self._collector_address)
                tasks.append(asyncio.create_task(self._refresh_targets()))
                tasks.append(asyncio.create_task(self._watch_collector(http)))
                await self._show(http, seconds)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._end)
        return 0

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # ---- parts ---------------------------------------------------------------------------------

    def _command(self, *words: str) -> list[str]:
        config = ["--config", self.config_file] if self.config_file else []
        return [sys.executable, "-m", "servoscope.cli.main", *config, *words]

    async def _start_collector(self, http: aiohttp.ClientSession) -> None:
        host, port = self.settings.collector.listen, self.settings.collector.port
        url = f"http://{host}:{port}"
        if await _is_collector(http, url):
            self.collector_url = url
            self.notices.append(f"using the collector that already runs at {url}")
            return
        await self._run_collector(http, host, free_port(host, port))

    async def _start_collector_for_embedded(self, http: aiohttp.ClientSession) -> None:
        """One whose database starts empty: toy figures must not mix with real ones.

        Not on the usual port, where another ``up`` would take it for the real one.
        """
        host, port = self.settings.collector.listen, self.settings.collector.port
        port = free_port(host, port + 1 if port else 0)
        database = self.resources.enter_context(empty_database())
        await self._run_collector(http, host, port, "--database", str(database))

    async def _run_collector(
        self, http: aiohttp.ClientSession, host: str, port: int, *words: str
    ) -> None:
        self.collector_url = f"http://{host}:{port}"
        self.collector_is_ours = True
        command = self._command("collector", "--port", str(port), *words)
        child = self.children.start("collector", command)
        self._say(f"collector  {self.collector_url}")
        await self._until(child, lambda: _is_collector(http, self.collector_url))

    async def _watch_collector(self, http: aiohttp.ClientSession) -> None:
        """Where the collector of somebody else ends: one of our own on the same port."""
        silent_since: float | None = None
        takeovers = 0
        while not self.collector_is_ours and takeovers < MAX_TAKEOVERS:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            if await _is_collector(http, self.collector_url):
                silent_since = None
            elif silent_since is None:
                silent_since = now
            elif now - silent_since >= AWAY_SECONDS:
                takeovers += 1
                silent_since = None
                await self._take_over(http)

    async def _take_over(self, http: aiohttp.ClientSession) -> None:
        port = str(self.settings.collector.port)
        child = self.children.start("collector", self._command("collector", "--port", port))
        deadline = time.monotonic() + START_SECONDS
        while child.alive and time.monotonic() < deadline:
            if await _is_collector(http, self.collector_url):
                break
            await asyncio.sleep(0.1)
        # Another `up` may have been quicker: then ours ends on the taken port, and theirs is used.
        await asyncio.sleep(POLL_SECONDS)
        self.collector_is_ours = child.alive
        if child.alive:
            self.notices.append("the collector ended; this is one of our own on the same port")
        elif await _is_collector(http, self.collector_url):
            self.children.forget(child)

    async def _engines(self) -> list[str]:
        if self.embedded:
            return []
        if self.urls:
            return list(self.urls)
        found = [target.url for target in await discover()]
        attached = {s.server for s in registered_sidecars()}
        for url in found:
            note = " (has a sidecar already)" if server_of(url) in attached else ""
            self._say(f"engine     {url}{note}")
        return found

    def _start_sidecar(self, url: str, *extra: str) -> None:
        self.servers.add(server_of(url))
        if any(s.server == server_of(url) for s in registered_sidecars()):
            self.notices.append(f"{url} has a sidecar already; it is left as it is")
            return
        name = "sidecar-" + server_of(url).replace(":", "_")
        words = ("sidecar", url, "--collector", self.collector_url, *extra)
        self.children.start(name, self._command(*words))

    async def _start_embedded(self) -> asyncio.Task[Any]:
        why = "embedded engine, as asked" if self.embedded else "no LLM server found on this host"
        self._say(f"{why}: starting the embedded llama.cpp server")
        self.engine = EmbeddedEngine()
        try:
            await asyncio.to_thread(self.engine.start)
        except EngineStartError as error:
            raise StackError(str(error)) from error
        relay = f"127.0.0.1:{free_port('127.0.0.1', 9880)}"
        self.relay_url = f"http://{relay}"
        # The embedded engine has no cold GPU to warm: its first minute is what people came to see.
        self._start_sidecar(self.engine.url, "--relay", relay, "--tap", "off",
                            "--warmup-seconds", "0")  # fmt: skip
        self._say(f"engine     {self.engine.url} (embedded; through the relay {self.relay_url})")
        self.notices.append(
            f"{why}: this is the llama.cpp server with a tiny random model, under a replayed "
            "public trace; its figures are kept apart and dropped"
        )
        return asyncio.create_task(self._replay())

    async def _replay(self) -> None:
        host, _, port = self.relay_url.removeprefix("http://").partition(":")
        while not self.stopping.is_set():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                break
            await asyncio.sleep(0.1)
        await replay_sample(self.relay_url, stop=self.stopping)

    def _own_sidecars(self) -> list[Registered]:
        """Of the engines that this ``up`` shows, whoever started them."""
        return [s for s in registered_sidecars() if s.server in self.servers]

    async def _await_sidecars(self) -> None:
        """Wait until each sidecar answers, died, or took too long; one that fails stops none."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self.stopping.is_set():
            dead = [c for c in self.children.dead() if c.name.startswith("sidecar-")]
            if len(self._own_sidecars()) + len(dead) >= len(self.servers):
                break
            await asyncio.sleep(0.2)
        for child in self.children.dead():
            self.notices.append(f"{child.name} ended: {child.last_lines(1)} (log: {child.log})")
        for sidecar in self._own_sidecars():
            self._say(f"metrics    {sidecar.url}/metrics  ({sidecar.server})")
        if not self._own_sidecars() and not self.stopping.is_set():
            last = "\n".join(c.last_lines() for c in self.children.dead())
            raise StackError(f"no sidecar came up. {last}\nLogs: {self.children.log_dir}")

    async def _until(self, child: Child, ready: Any) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await ready():
            if not child.alive:
                raise StackError(
                    f"the {child.name} ended at its start:\n{child.last_lines()}\nLog: {child.log}"
                )
            if time.monotonic() > deadline or self.stopping.is_set():
                raise StackError(f"the {child.name} did not answer. Log: {child.log}")
            await asyncio.sleep(0.1)

    @property
    def _collector_address(self) -> str:
        return self.collector_url.removeprefix("http://")

    async def _refresh_targets(self) -> None:
        while True:
            await asyncio.sleep(TARGETS_SECONDS)
            with contextlib.suppress(OSError):  # a full disk: tried again
                await asyncio.to_thread(write_targets, self._collector_address)

    # ---- view ----------------------------------------------------------------------------------

    async def _overview(self, http: aiohttp.ClientSession) -> Mapping[str, Any] | None:
        url = f"{self.collector_url}/api/v1/overview"
        try:
            async with http.get(url, params={"window_seconds": f"{self.window_seconds:g}"}) as got:
                if got.status != 200:
                    return None
                body: Mapping[str, Any] = await got.json()
                return body
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _sources(self, http: aiohttp.ClientSession) -> list[str]:
        """A line or two a sidecar: which source is in force and where /metrics is."""
        found = [await source_lines(http, sidecar) for sidecar in self._own_sidecars()]
        return [line for lines in found for line in lines]

    async def _show(self, http: aiohttp.ClientSession, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        live = self.console.is_terminal
        view = Live(console=self.console, auto_refresh=False, screen=False) if live else None
        last: Mapping[str, Any] | None = None
        with view or contextlib.nullcontext():
            while not self.stopping.is_set() and (end is None or time.monotonic() < end):
                last = await self._overview(http) or last
                notices = [*await self._sources(http), *self.notices, *self._faults()]
                width = self.console.width
                servers = {s.server for s in registered_sidecars()}
                picture = render(
                    last, now=time.time(), notices=notices, width=width, servers=servers
                )
                if view is not None:
                    view.update(picture, refresh=True)
                else:
                    self.console.print(picture)
                pause = POLL_SECONDS if live else PLAIN_SECONDS
                if end is not None:
                    pause = min(pause, max(0.05, end - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), pause)

    def _faults(self) -> list[str]:
        return [f"{c.name} ended: {c.last_lines(1)} (log: {c.log})" for c in self.children.dead()]

    def _end(self) -> None:
        self.children.end_all()
        if self.engine is not None:
            self.engine.stop()
        self.resources.close()
        if self.collector_url:
            with contextlib.suppress(OSError):
                write_targets(self._collector_address, leaving=True)


async def _is_collector(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/api/v1/policy") as got:
            return got.status == 200 and "slo_digest" in await got.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

import aiohttp
from rich.console import RenderableType

from servoscope.cli.children import Children
from servoscope.cli.keeper import START_SECONDS, Keeper
from servoscope.cli.scratch import StackError, empty_database, free_port
from servoscope.cli.screen import Screen
from servoscope.cli.servers import server_of, unique_servers
from servoscope.cli.settings import Settings
from servoscope.cli.sidecars import Registered, registered_sidecars
from servoscope.cli.sources import source_lines
from servoscope.cli.targets import write_targets
from servoscope.cli.view import render
from servoscope.exporters.paths import private_directory, run_dir, state_dir
from servoscope.lab.embedded.server import EmbeddedEngine, EngineStartError
from servoscope.lab.replay import replay_sample
from servoscope.sidecar.attach.discovery import discover

__all__ = ["Stack", "StackError"]

POLL_SECONDS = 1.0
PLAIN_SECONDS = 10.0  # between two prints where the output is no terminal
TARGETS_SECONDS = 3.0  # between two writes of the targets for Prometheus


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
        self.screen = Screen(out)
        self.config_file = config_file
        self.urls = urls
        self.embedded = embedded
        self.window_seconds = window_seconds
        self.children = Children(state_dir() / "logs")
        self.resources = contextlib.ExitStack()  # closed when the children have ended
        self.engine: EmbeddedEngine | None = None
        self.relay_url = ""
        self.collector_address = ""
        self.servers: set[str] = set()  # host:port of the engines that this one shows
        self.notices: list[str] = []
        self.stopping = asyncio.Event()

    async def run(self, seconds: float | None) -> int:
        """Start all, show until the end, end all. Returns an exit code: 0 however it was told to.

        Raises StackError when a part does not start.
        """
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
                keeper = self._keeper(http)
                await self._start(keeper, tasks)
                await self._await_sidecars()
                await asyncio.to_thread(write_targets, keeper.address)
                tasks.append(asyncio.create_task(self._refresh_targets()))
                tasks.append(asyncio.create_task(keeper.watch()))
                await self._show(http, keeper, seconds)
        except StackError:
            if not self.stopping.is_set():  # told to end while it started: that is no failure
                raise
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

    async def _start(self, keeper: Keeper, tasks: list[asyncio.Task[Any]]) -> None:
        """Collector, then a sidecar an engine; where no engine is, the embedded one."""
        engines = await self._engines()
        if engines:
            await keeper.start()
        else:
            await keeper.start_apart(self.resources.enter_context(empty_database()))
        self.collector_address = keeper.address
        for url in engines:
            self._start_sidecar(url, keeper.url)
        if not engines:
            tasks.append(await self._start_embedded(keeper.url))

    def _command(self, *words: str) -> list[str]:
        config = ["--config", self.config_file] if self.config_file else []
        return [sys.executable, "-m", "servoscope.cli.main", *config, *words]

    def _keeper(self, http: aiohttp.ClientSession) -> Keeper:
        try:
            return Keeper(
                self.settings.collector, http, self.children, self._command,
                say=self._say, notices=self.notices, stopping=self.stopping,
            )  # fmt: skip
        except OSError as error:  # the token file
            raise StackError(f"collector.{error}") from error

    async def _engines(self) -> list[str]:
        """URLs of the servers to attach to, each server once."""
        if self.embedded:
            return []
        if self.urls:
            try:
                return await asyncio.to_thread(unique_servers, self.urls)
            except ValueError as error:
                raise StackError(str(error)) from error
        targets = await discover()
        found = await asyncio.to_thread(unique_servers, [target.url for target in targets])
        attached = {s.server for s in registered_sidecars()}
        for url in found:
            note = " (has a sidecar already)" if server_of(url) in attached else ""
            self._say(f"engine     {url}{note}")
        return found

    def _start_sidecar(self, url: str, collector_url: str, *extra: str) -> None:
        server = server_of(url)
        self.servers.add(server)
        if any(s.server == server for s in registered_sidecars()):
            self.notices.append(f"{url} has a sidecar already; it is left as it is")
            return
        name = "sidecar-" + server.replace(":", "_")
        words = ("sidecar", url, "--collector", collector_url, *extra)
        self.children.start(name, self._command(*words))

    async def _start_embedded(self, collector_url: str) -> asyncio.Task[Any]:
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
        self._start_sidecar(self.engine.url, collector_url, "--relay", relay, "--tap", "off",
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

    async def _refresh_targets(self) -> None:
        while True:
            await asyncio.sleep(TARGETS_SECONDS)
            with contextlib.suppress(OSError):  # a full disk: tried again
                await asyncio.to_thread(write_targets, self.collector_address)

    # ---- view ----------------------------------------------------------------------------------

    async def _sources(self, http: aiohttp.ClientSession) -> list[str]:
        """A line or two a sidecar: which source is in force and where /metrics is."""
        found = [await source_lines(http, sidecar) for sidecar in self._own_sidecars()]
        return [line for lines in found for line in lines]

    async def _show(
        self, http: aiohttp.ClientSession, keeper: Keeper, seconds: float | None
    ) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        pause = POLL_SECONDS if self.screen.live else PLAIN_SECONDS
        last: Mapping[str, Any] | None = None
        with self.screen, self._redrawn_when_resized():
            while not self.stopping.is_set() and (end is None or time.monotonic() < end):
                last = await keeper.overview(self.window_seconds) or last
                notices = [*await self._sources(http), *self.notices, *self._faults()]
                picture = partial(
                    _picture, last, time.time(), notices, {s.server for s in registered_sidecars()}
                )
                self.screen.show(picture)
                left = pause if end is None else min(pause, max(0.05, end - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), left)

    @contextlib.contextmanager
    def _redrawn_when_resized(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if self.screen.live:
            loop.add_signal_handler(signal.SIGWINCH, self.screen.again)
        try:
            yield
        finally:
            if self.screen.live:
                loop.remove_signal_handler(signal.SIGWINCH)

    def _faults(self) -> list[str]:
        return [f"{c.name} ended: {c.last_lines(1)} (log: {c.log})" for c in self.children.dead()]

    def _end(self) -> None:
        self.children.end_all()
        if self.engine is not None:
            self.engine.stop()
        self.resources.close()
        if self.collector_address:
            with contextlib.suppress(OSError):
                write_targets(self.collector_address, leaving=True)


def _picture(
    overview: Mapping[str, Any] | None,
    now: float,
    notices: Sequence[str],
    servers: Collection[str],
    width: int,
) -> RenderableType:
    return render(overview, now=now, notices=notices, width=width, servers=servers)

"""Requests from the plug-in's socket: a real unix socket that speaks the plug-in's lines."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.background import background
from servoscope.exporters.records import Outcome, Phase, RequestRecord, SourceState
from servoscope.exporters.vllm.requests import StatsClient
from servoscope.sidecar.sources.plugin import PluginSource

pytestmark = pytest.mark.usefixtures("ended_streams")

NOW = 1_800_000_000.0


class FakePlugin:
    """One API-server process' stats socket."""

    def __init__(self, directory: Path, pid: int, protocol: int = 1) -> None:
        self.path = directory / f"stats-{pid}.sock"
        self.hello: dict[str, Any] = {
            "type": "hello", "protocol": protocol, "version": "0.1.0", "engine": "vllm",
            "engine_version": "0.32.0", "boot_id": f"boot-{pid}", "boot_values": {}, "pid": pid,
            "rank": None, "model_names": ["tiny"], "missing": [], "off": "",
        }  # fmt: skip
        self.open: list[dict[str, Any]] = []
        self.acked = 0
        self.seq = 0
        self.dropped = 0
        self.writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self.writers:
            writer.close()
        self.path.unlink(missing_ok=True)

    async def record(self, ident: str, **fields: Any) -> None:
        self.seq += 1
        await self.say({
            "type": "record", "seq": self.seq, "dropped": self.dropped, "request_id": ident,
            "outcome": "completed", "phase": "decode", "finished_unix_seconds": NOW,
            "e2e_seconds": 1.0, **fields,
        })  # fmt: skip

    async def say(self, message: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(self.hello).encode() + b"\n")
        while line := await reader.readline():
            message = json.loads(line)
            if message["op"] == "subscribe":
                self.writers.append(writer)
                writer.write(b'{"type":"subscribed","dropped":0}\n')
            elif message["op"] == "open":
                answer = {"type": "open", "requests": self.open, "total": len(self.open)}
                writer.write(json.dumps(answer).encode() + b"\n")
            elif message["op"] == "ack":
                self.acked = message["seq"]
        writer.close()


class Watched:
    """A PluginSource at work."""

    def __init__(self, directory: Path) -> None:
        self.pids = [101]
        self.now, self.steady = NOW, 10.0
        self.is_alive = True
        self.records: list[RequestRecord] = []
        self.connects = 0
        self.source = PluginSource(
            lambda: ([directory], self.pids),
            alive=lambda: self.is_alive,
            clock=lambda: self.now,
            steady=lambda: self.steady,
            poll_seconds=0.01,
            on_connect=self._connected,
        )

    def _connected(self) -> None:
        self.connects += 1

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not done():  # noqa: ASYNC110 - whatever the test waits for
                await asyncio.sleep(0.005)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path)
    async with background(made.source.run(made.records.append)):
        yield made


async def test_without_a_socket_it_is_off_and_says_what_to_do(watched: Watched) -> None:
    await watched.until(lambda: watched.source.settled)
    status = watched.source.status(10.0)
    assert status.state is SourceState.OFF
    assert "pip install --no-deps PATH" in status.detail
    assert watched.source.missing() == status.detail


async def test_records_arrive_once_and_are_acknowledged(watched: Watched, tmp_path: Path) -> None:
    plugin = FakePlugin(tmp_path, 101)
    await plugin.start()
    await watched.until(lambda: bool(plugin.writers))
    assert watched.source.missing() is None
    await plugin.record("a", prompt_tokens=7)
    await plugin.record("b")
    await watched.until(lambda: plugin.acked == 2)
    assert [r.request_id for r in watched.records] == ["a", "b"]
    assert (watched.records[0].prompt_tokens, watched.records[0].model_name) == (7, "tiny")
    watched.now += 3600.0  # a step of the wall clock is no time that went by
    assert watched.source.status(20.0).state is SourceState.OK
    assert watched.source.status(20.0).last_success_unix_seconds == NOW
    assert watched.source.status(610.0).state is SourceState.IDLE
    await plugin.stop()


async def test_a_bad_record_costs_only_itself(watched: Watched, tmp_path: Path) -> None:
    plugin = FakePlugin(tmp_path, 101)
    await plugin.start()
    await watched.until(lambda: bool(plugin.writers))
    await plugin.say({"type": "record", "seq": 1, "request_id": "x", "outcome": "nonsense"})
    plugin.seq = 1
    plugin.dropped = 5
    await plugin.record("good")
    await watched.until(lambda: len(watched.records) == 1)
    drops = watched.source.drops()
    assert (drops["refused_record"], drops["plugin_buffer"]) == (1, 5)
    await plugin.stop()
    await watched.until(lambda: watched.source.missing() is not None)
    assert watched.source.drops()["plugin_buffer"] == 5  # monotone although the socket is gone


async def test_two_api_servers_and_a_restart_are_all_read(watched: Watched, tmp_path: Path) -> None:
    watched.pids = [101, 102]
    one, two = FakePlugin(tmp_path, 101), FakePlugin(tmp_path, 102)
    await one.start()
    await two.start()
    await watched.until(lambda: bool(one.writers) and bool(two.writers))
    await one.record("a")
    await two.record("b")
    await watched.until(lambda: len(watched.records) == 2)
    await one.stop()
    await two.stop()
    watched.pids = [103]
    three = FakePlugin(tmp_path, 103)
    await three.start()
    await watched.until(lambda: bool(three.writers))
    await three.record("c")
    await watched.until(lambda: len(watched.records) == 3)
    await three.stop()


async def test_open_requests_are_listed(watched: Watched, tmp_path: Path) -> None:
    plugin = FakePlugin(tmp_path, 101)
    plugin.open = [{"request_id": "o", "phase": "decode", "prompt_tokens": 9,
                    "received_unix_seconds": NOW - 3, "lora": None},
                   {"request_id": "p", "phase": "nonsense"}]  # fmt: skip
    await plugin.start()
    await watched.until(lambda: len(list(watched.source.open_requests())) == 2)
    first, second = watched.source.open_requests()
    assert (first.phase, first.prompt_tokens, first.model_name) == (Phase.DECODE, 9, "tiny")
    assert second.phase is Phase.UNKNOWN
    await plugin.stop()


async def test_an_engine_that_dies_takes_its_open_requests_along_as_errors_once(
    watched: Watched, tmp_path: Path
) -> None:
    plugin = FakePlugin(tmp_path, 101)
    plugin.open = [{"request_id": i, "phase": "decode", "received_unix_seconds": NOW - 3}
                   for i in ("finished meanwhile", "died")]  # fmt: skip
    await plugin.start()
    await watched.until(lambda: len(list(watched.source.open_requests())) == 2)
    await asyncio.sleep(0.05)
    await plugin.record("finished meanwhile")
    await watched.until(lambda: len(watched.records) == 1)
    watched.is_alive = False
    await plugin.stop()
    await watched.until(lambda: len(watched.records) == 2)
    died = watched.records[1]
    assert (died.request_id, died.outcome, died.phase) == ("died", Outcome.ERROR, Phase.DECODE)
    assert died.e2e_seconds == pytest.approx(3.0)


async def test_a_request_that_came_just_before_the_engine_died_is_an_error_too(
    watched: Watched, tmp_path: Path
) -> None:
    plugin = FakePlugin(tmp_path, 101)
    await plugin.start()
    await watched.until(lambda: bool(plugin.writers))
    watched.is_alive = False
    one = {"request_id": "late", "phase": "prefill", "request_type_hint": "rag"}
    await plugin.say({"type": "opened", "requests": [one]})  # told, not asked for
    await plugin.stop()
    await watched.until(lambda: len(watched.records) == 1)
    (died,) = watched.records
    assert (died.request_id, died.outcome, died.request_type_hint) == ("late", Outcome.ERROR, "rag")


@pytest.mark.parametrize(("said", "headers_unseen"), [("http", False), ("engine", True)])
async def test_what_it_is_blind_to_depends_on_whose_clock_it_is(
    watched: Watched, tmp_path: Path, said: str, headers_unseen: bool
) -> None:
    plugin = FakePlugin(tmp_path, 101)
    plugin.hello["received_by"] = said
    await plugin.start()
    await watched.until(lambda: bool(plugin.writers))
    blind = " ".join(watched.source.status(10.0).blind_to)
    assert ("x-request-type" in blind) is headers_unseen
    assert f"when the {'HTTP server' if said == 'http' else 'engine'}" in blind
    await plugin.stop()


async def test_open_requests_are_not_lost_when_the_clients_list_is_emptied_first(
    watched: Watched, tmp_path: Path
) -> None:
    plugin = FakePlugin(tmp_path, 101)
    plugin.open = [{"request_id": "died", "phase": "decode"}]
    await plugin.start()
    await watched.until(lambda: bool(watched.source._open.get(plugin.path)))
    (client,) = watched.source._clients.values()
    client._open.clear()
    await asyncio.sleep(0.05)  # some more looks
    watched.is_alive = False
    await plugin.stop()
    await watched.until(lambda: [r.request_id for r in watched.records] == ["died"])


async def test_a_version_that_we_do_not_speak_is_a_failure_in_words(
    watched: Watched, tmp_path: Path
) -> None:
    plugin = FakePlugin(tmp_path, 101, protocol=99)
    await plugin.start()
    await watched.until(lambda: watched.source.status(10.0).state is SourceState.FAILED)
    detail = watched.source.status(10.0).detail
    assert "protocol" in detail
    assert str(plugin.path) in detail
    assert watched.source.missing() == detail
    await plugin.stop()


async def test_a_plug_in_that_is_off_is_not_used(watched: Watched, tmp_path: Path) -> None:
    plugin = FakePlugin(tmp_path, 101)
    plugin.hello["off"] = "unknown layout"
    await plugin.start()
    await watched.until(lambda: watched.source.settled)
    await watched.until(lambda: watched.source.status(10.0).state is SourceState.FAILED)
    assert "unknown layout" in (watched.source.missing() or "")
    await plugin.stop()


async def test_a_fault_of_ours_in_one_socket_is_said_and_costs_no_other(tmp_path: Path) -> None:
    class Faulty(StatsClient):
        async def run(self, *words: Any, **named: Any) -> None:
            if self.path.name == "stats-1.sock":
                raise OverflowError("int too large to convert to float")
            await super().run(*words, **named)

    plugins = [FakePlugin(tmp_path, 1), FakePlugin(tmp_path, 2)]
    for plugin in plugins:
        await plugin.start()
    records: list[RequestRecord] = []
    source = PluginSource(
        lambda: ([tmp_path], [1, 2]), alive=lambda: True, client=Faulty, poll_seconds=0.01
    )
    async with background(source.run(records.append)) as task:
        async with asyncio.timeout(10):
            while not plugins[1].writers:  # noqa: ASYNC110 - the other side's state
                await asyncio.sleep(0.01)
        await plugins[1].record("a")
        async with asyncio.timeout(10):
            while not records:  # noqa: ASYNC110 - whatever the source hands over
                await asyncio.sleep(0.01)
        assert not task.done()
        await plugins[1].stop()
        async with asyncio.timeout(10):
            while source.missing() is None:  # noqa: ASYNC110 - the other side's state
                await asyncio.sleep(0.01)
        assert source.status(10.0).state is SourceState.FAILED
        assert "a fault of ours: OverflowError" in source.status(10.0).detail
    await plugins[0].stop()


async def test_a_socket_of_another_user_says_who_may_read_it(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = FakePlugin(tmp_path, 101)

    async def refused(*_args: Any, **_kw: Any) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("servoscope.exporters.vllm.requests.StatsClient.run", refused)
    await plugin.start()
    await watched.until(lambda: watched.source.status(10.0).state is SourceState.FAILED)
    assert "SERVOSCOPE_SOCKET_GROUP" in watched.source.status(10.0).detail
    await plugin.stop()


async def test_junk_ids_at_100_times_the_cap_are_bounded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servoscope.sidecar.sources.plugin._RECENT", 50)
    for i in range(5_000):
        watched.source._remember(f"r{i}")
    assert len(watched.source._recent) == 50

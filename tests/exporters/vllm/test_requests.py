from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.background import background
from exporters.vllm import fakes
from servoscope.exporters.plugin.hello import Hello, ProtocolError, hello_from_message
from servoscope.exporters.plugin.line_server import Connection, LineServer
from servoscope.exporters.plugin.sockets import connect
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.vllm import stats_feed
from servoscope.exporters.vllm.lifecycle import MAX_LISTED
from servoscope.exporters.vllm.requests import (
    MAX_OPEN,
    StatsClient,
    find_stats_sockets,
    record_from_message,
)
from servoscope.exporters.vllm.stats_feed import StatsFeed, StatsHandler, observe

HELLO = Hello(
    protocol=1,
    version="0",
    engine="vllm",
    engine_version="0.32.0",
    boot_id="b",
    pid=1,
    model_names=("tiny",),
)


class Server:
    """A feed with hooked fakes behind a real socket."""

    def __init__(self, directory: Path) -> None:
        self.classes = fakes.fresh_classes()
        self.feed: StatsFeed = observe(
            fakes.vllm_config(), 0, directory, None, self.classes, may_bypass=True
        )
        self.processor = self.classes[0]()
        self.path = directory / f"stats-{self.feed.pid}.sock"
        self.done = 0

    def finish(self, count: int = 1, tokens: int = 3) -> None:
        for _ in range(count):
            self.done += 1
            ident = f"i{self.done}"
            self.processor.add_request(
                fakes.EngineCoreRequest(ident, f"cmpl-{self.done}-0", time.time())
            )
            for number in range(tokens):
                last = number == tokens - 1
                self.processor.process(
                    ident,
                    1,
                    10.0 + number / 8,
                    self.classes[1](),
                    events=(9.0, 9.5) if number == 0 else None,
                    finish=fakes.FinishReason.STOP if last else None,
                )


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_servers: list[LineServer]
) -> Iterator[Server]:
    monkeypatch.setattr(stats_feed, "watch_http", lambda _hooks: False)  # tests say it themselves
    started = Server(tmp_path)
    yield started
    started.feed.hooks.unwrap()


async def read(
    client: StatsClient, enough: Callable[[], bool], records: list[RequestRecord]
) -> None:
    """Run a client until ``enough`` holds, then cancel it (as a sidecar that goes away)."""
    async with background(client.run(records.append)) as task:
        deadline = time.monotonic() + 10
        while not enough() and not task.done():
            assert time.monotonic() < deadline, (client.__dict__, len(records))
            await asyncio.sleep(0.01)
        if task.done():
            task.result()
        await asyncio.sleep(0.1)  # the acknowledgement is on its way
        await cancel(task)


async def cancel(task: asyncio.Task[None]) -> None:
    """As a sidecar that goes away: the client ends by that, and by nothing else."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_records_reach_the_sidecar(server: Server) -> None:
    records: list[RequestRecord] = []
    client = StatsClient(server.path)
    server.finish(3)
    await read(client, lambda: len(records) == 3, records)
    assert [r.request_id for r in records] == ["cmpl-1", "cmpl-2", "cmpl-3"]
    first = records[0]
    assert first.source is Source.PLUGIN
    assert first.outcome is Outcome.COMPLETED
    assert first.phase is Phase.DECODE
    assert (first.prompt_tokens, first.output_tokens, first.model_name) == (10, 3, "tiny")
    assert first.queue_seconds == 0.5
    assert first.time_per_output_token_seconds == 0.125
    assert first.inter_token_seconds == (0.125, 0.125)
    assert first.streaming is True
    assert first.refuse_impossible(time.time()) == []
    assert client.hello is not None
    assert client.hello.missing == ()
    assert len(server.feed.buffer) == 0  # all acknowledged


async def test_a_sidecar_that_was_away_misses_nothing_and_gets_nothing_twice(
    server: Server,
) -> None:
    records: list[RequestRecord] = []
    server.finish(5)
    client = StatsClient(server.path)
    await read(client, lambda: len(records) == 5, records)
    server.finish(7)
    other = StatsClient(server.path)  # restarted: knows nothing
    await read(other, lambda: len(records) == 12, records)
    server.finish(1)
    await read(client, lambda: len(records) == 13, records)
    assert [r.request_id for r in records] == [f"cmpl-{n}" for n in range(1, 14)]


async def test_a_record_that_was_not_taken_comes_again(server: Server) -> None:
    server.finish(4)
    taken: list[RequestRecord] = []

    def sink(record: RequestRecord) -> None:
        if len(taken) == 2:
            raise OverflowError("the sidecar stumbles")
        taken.append(record)

    client = StatsClient(server.path)
    with pytest.raises(OverflowError):
        await client.run(sink)
    await read(client, lambda: len(taken) == 4, taken)
    assert [r.request_id for r in taken] == ["cmpl-1", "cmpl-2", "cmpl-3", "cmpl-4"]


async def test_away_for_100_times_the_buffer(server: Server) -> None:
    server.feed.buffer.capacity = 20
    for _ in range(20):
        server.finish(100)
        await asyncio.sleep(0)
    records: list[RequestRecord] = []
    client = StatsClient(server.path)
    await read(client, lambda: len(records) >= 20, records)
    assert len(records) + client.dropped_total == 2000
    assert len(records) <= 40


async def test_one_reader_at_a_time(server: Server) -> None:
    records: list[RequestRecord] = []
    first, second = StatsClient(server.path), StatsClient(server.path)
    async with background(first.run(records.append)) as task:
        server.finish(1)
        await until(lambda: bool(records))
        with pytest.raises(ProtocolError, match=r"refused: pid \d+ reads this feed"):
            await second.run(records.append)
        await cancel(task)


async def test_requests_in_flight(server: Server) -> None:
    server.processor.add_request(fakes.EngineCoreRequest("i", "chatcmpl-x", 100.0))
    client = StatsClient(server.path, open_poll_seconds=0.02)
    records: list[RequestRecord] = []
    async with background(client.run(records.append)) as task:
        await until(lambda: bool(client.in_flight))
        assert client.in_flight == [
            {
                "request_id": "chatcmpl-x",
                "phase": "prefill",
                "prompt_tokens": 10,
                "received_unix_seconds": 100.0,
                "model_name": "tiny",
                "request_type_hint": None,
            }
        ]
        await cancel(task)
    assert client.in_flight == []


async def test_a_new_request_is_told_before_anybody_asks(server: Server) -> None:
    client = StatsClient(server.path, open_poll_seconds=1000.0)
    records: list[RequestRecord] = []
    async with background(client.run(records.append)) as task:
        await until(lambda: server.feed.life.announcing)
        await asyncio.sleep(0.05)  # the one list that is asked for at the start
        server.processor.add_request(fakes.EngineCoreRequest("a", "chatcmpl-a", 100.0))
        server.processor.add_request(fakes.EngineCoreRequest("b", "chatcmpl-b", 100.0))
        await until(lambda: client.in_flight_total == 2)
        told = [(one["request_id"], one["phase"]) for one in client.in_flight]
        assert told == [("chatcmpl-a", "prefill"), ("chatcmpl-b", "queued")]
        server.finish(1)  # came and went within a tick
        server.processor.process("a", 1, 10.0, server.classes[1](), finish=fakes.FinishReason.STOP)
        await until(lambda: len(records) == 2)
        assert [one["request_id"] for one in client.in_flight] == ["chatcmpl-b"]
        await cancel(task)
    await until(lambda: not server.feed.life.announcing)


def test_told_and_not_read_is_bounded(server: Server) -> None:
    life = server.feed.life
    life.announcing = True
    for number in range(MAX_LISTED * 3):
        server.processor.add_request(fakes.EngineCoreRequest(f"x{number}", f"chatcmpl-{number}", 1))
    told = life.take_opened()
    assert len(told) == MAX_LISTED
    assert told[-1]["request_id"] == f"chatcmpl-{MAX_LISTED * 3 - 1}"
    assert life.take_opened() == []


async def test_what_was_in_flight_is_readable_when_the_engine_is_gone(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({**GOOD_HELLO, "received_by": "http"}).encode() + b"\n")
        listed = [{"request_id": "a", "phase": "decode"}, "junk"]
        answer = {"type": "open", "requests": listed, "total": 5, "received_by": "engine"}
        writer.write(json.dumps(answer).encode() + b"\n")
        new = [{"request_id": f"n{number}", "request_type_hint": "rag"} for number in range(9000)]
        writer.write(json.dumps({"type": "opened", "requests": new}).encode() + b"\n")
        writer.write(json.dumps({"type": "opened", "requests": "junk"}).encode() + b"\n")
        await writer.drain()
        writer.close()

    path = tmp_path / "s.sock"
    async with await asyncio.start_unix_server(serve, path):
        client = StatsClient(path)
        await asyncio.wait_for(client.run(lambda _: None), 10)
    assert client.received_by == "engine"  # said later than hello
    assert len(client.in_flight) == MAX_OPEN
    assert (client.in_flight[0]["request_id"], client.in_flight[1]["phase"]) == ("a", "unknown")
    assert client.in_flight[1]["request_type_hint"] == "rag"
    assert client.in_flight_total == MAX_OPEN + 4
    path.unlink()
    with pytest.raises(FileNotFoundError):
        await client.run(lambda _: None)
    assert client.in_flight == []


async def test_the_end_of_the_engine_is_the_end_of_run(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(GOOD_HELLO).encode() + b"\n" + b"x" * 10 + b"\n[1]\n")
        writer.write(json.dumps({"type": "record", "seq": 1, "request_id": "a"}).encode() + b"\n")
        writer.write(
            json.dumps(
                {"type": "record", "seq": 2, "request_id": "b", "outcome": "length", "rank": "?"}
            ).encode()
            + b"\n"
        )
        writer.write(json.dumps({"type": "something new"}).encode() + b"\n")
        await reader.readline()
        writer.close()

    records: list[RequestRecord] = []
    path = tmp_path / "s.sock"
    async with await asyncio.start_unix_server(serve, path):
        client = StatsClient(path)
        await asyncio.wait_for(client.run(records.append), 10)
    assert [(r.request_id, r.rank) for r in records] == [("b", None)]
    assert (client.garbage_total, client.refused_total) == (2, 1)
    assert "outcome" in client.last_refusal


GOOD_HELLO = {
    "type": "hello",
    "protocol": 1,
    "version": "0.1.0",
    "engine": "vllm",
    "engine_version": "0.32.0",
    "boot_id": "b",
    "boot_values": {},
    "pid": 1,
    "model_names": ["tiny"],
}


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"SSH-2.0-OpenSSH\n", "no hello"),
        (b"", "no hello"),
        (json.dumps({"type": "record"}).encode() + b"\n", "not hello"),
        (json.dumps({**GOOD_HELLO, "protocol": 2}).encode() + b"\n", "protocol: .* speaks 2"),
        (json.dumps({**GOOD_HELLO, "pid": "x"}).encode() + b"\n", "pid"),
        (json.dumps({"type": "refused", "why": "uid 7"}).encode() + b"\n", "uid 7"),
        (json.dumps({**GOOD_HELLO, "off": "unknown layout"}).encode() + b"\n", "unknown layout"),
    ],
)
async def test_what_is_no_plugin_of_ours(tmp_path: Path, first: bytes, why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await writer.drain()
        writer.close()

    path = tmp_path / "s.sock"
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(ProtocolError, match=why):
            await StatsClient(path).run(lambda _: None)


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await StatsClient(tmp_path / "none.sock").run(lambda _: None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "request_id",
        "outcome",
        "phase",
        "rank",
        "lora",
        "queue_seconds",
        "inter_token_seconds",
        "prompt_tokens",
        "streaming",
        "pooling",
        "finished_unix_seconds",
        "type",
        "boot_id",
        "pid",
        "protocol",
        "model_names",
    ]
)


@given(st.dictionaries(FIELDS, JSON))
def test_any_message_is_a_record_or_a_named_refusal(message: dict[str, Any]) -> None:
    record = None
    try:
        record = record_from_message({"outcome": "length", "request_id": "x", **message}, HELLO)
    except ValueError as error:
        named = str(error).split(":")[0]
    if record is None:
        assert named in ("request_id", "outcome")
        return
    record.refuse_impossible(2e9)
    assert record.queue_seconds is None or record.queue_seconds >= 0


@given(st.dictionaries(FIELDS, JSON))
def test_any_hello_is_checked(message: dict[str, Any]) -> None:
    hello = None
    try:
        hello = hello_from_message({**GOOD_HELLO, **message})
    except ProtocolError:
        return
    assert isinstance(hello.model_name, str)


def test_embeddings_have_no_token_times() -> None:
    record = record_from_message(
        {"request_id": "embd-x", "outcome": "completed", "pooling": True, "prefill_seconds": 1.0},
        HELLO,
    )
    assert record.prefill_seconds is None
    assert record.time_to_first_token_seconds is None


def test_find_stats_sockets(server: Server, tmp_path: Path) -> None:
    assert find_stats_sockets([tmp_path], [server.feed.pid]) == [server.path]
    assert find_stats_sockets([tmp_path], [1]) == []


def test_a_reader_that_never_acknowledges_is_dropped(server: Server) -> None:
    clock = fakes.Clock()
    feed = server.feed
    handler = StatsHandler(feed.buffer, feed.life, feed.hooks, feed.hello, clock=clock)
    with connect(server.path) as socket_:
        stuck, fresh = Connection(socket_, 1), Connection(socket_, 2)
        handler.received(stuck, {"op": "subscribe"})
        server.finish(2)
        handler.tick([])
        clock.now += 61
        handler.tick([])
        assert stuck.closing
        assert b"nothing acknowledged" in stuck.out
        handler.received(fresh, {"op": "subscribe"})
        handler.tick([])
        assert fresh.out.count(b'"type":"record"') == 2


def test_only_a_benchmark_may_bypass_and_only_while_it_reads(server: Server) -> None:
    feed = server.feed
    strict = StatsHandler(feed.buffer, feed.life, feed.hooks, feed.hello)
    loose = StatsHandler(feed.buffer, feed.life, feed.hooks, feed.hello, may_bypass=True)
    with connect(server.path) as socket_:
        peer = Connection(socket_, 1)
        strict.received(peer, {"op": "bypass", "on": True})
        assert b"unknown op" in peer.out
        assert not feed.hooks.bypass
        loose.received(peer, {"op": "subscribe"})
        loose.received(peer, {"op": "bypass", "on": True})
        assert feed.hooks.bypass
        loose.closed(peer)
        assert not feed.hooks.bypass


async def test_a_refusal_is_heard_because_nothing_is_sent_before_the_answer(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(GOOD_HELLO).encode() + b"\n")
        asked.append(await reader.readline())
        try:
            asked.append(await asyncio.wait_for(reader.readline(), 0.2))
        except TimeoutError:
            writer.write(json.dumps({"type": "refused", "why": "no"}).encode() + b"\n")
        writer.close()

    path = tmp_path / "s.sock"
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(ProtocolError, match="refused: no"):
            await StatsClient(path, open_poll_seconds=0.01).run(lambda _: None)
    assert asked == [b'{"op":"subscribe"}\n']

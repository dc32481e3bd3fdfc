from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from engines.background import background
from servoscope.exporters.records import Outcome, RequestRecord, SourceState
from servoscope.sidecar.relay.source import RelaySource
from servoscope.sidecar.relay.watch import Watch
from sidecar.wire.fake_engine import fake_engine, serving
from sidecar.wire.talk import request

pytestmark = pytest.mark.usefixtures("ended_streams")


@contextlib.asynccontextmanager
async def relayed(
    upstream_port: int, **options: Any
) -> AsyncIterator[tuple[RelaySource, list[RequestRecord]]]:
    """A relay in front of ``upstream_port`` and the records it made."""
    relay = RelaySource("127.0.0.1", 0, "127.0.0.1", upstream_port, **options)
    records: list[RequestRecord] = []
    async with background(relay.run(records.append)):
        await asyncio.wait_for(relay.listening.wait(), 5)
        yield relay, records
    assert relay._links == set()


async def connect(relay: RelaySource) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", relay.port)


async def until(condition: Callable[[], bool]) -> None:
    """Wait (at most 10 s) until ``condition``."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """One chunked or Content-Length answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head:
        return head + await reader.readuntil(b"\r\n0\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def ask(**body: Any) -> bytes:
    return request({"stream": True, "model": "q"} | body, headers="X-Request-Type: chat\r\n")


async def test_streams_byte_for_byte_and_measures() -> None:
    async with fake_engine() as engine, relayed(engine.port) as (relay, records):
        reader, writer = await connect(relay)
        up, down = hashlib.sha256(), hashlib.sha256()
        for _ in range(3):  # keep-alive
            writer.write(ask(max_tokens=4, wait=0.02, gap=0.01))
            up.update(ask(max_tokens=4, wait=0.02, gap=0.01))
            down.update(await read_answer(reader))
        writer.close()
        await until(lambda: len(records) == 3)
        assert (up.digest(), down.digest()) == (engine.received.digest(), engine.sent.digest())
        assert engine.connections == 1
        for record in records:
            assert (record.outcome, record.output_tokens, record.cached_tokens) == (
                Outcome.LENGTH,
                4,
                4,
            )
            assert record.request_type_hint == "chat"
            assert record.server == f"127.0.0.1:{engine.port}"
            assert record.time_to_first_token_seconds is not None
            assert record.time_to_first_token_seconds >= 0.01
            assert record.time_per_output_token_seconds is not None
            assert record.time_per_output_token_seconds >= 0.005
            assert record.refuse_impossible(time.time()) == []
        assert not relay.drops()
        assert relay.status(time.monotonic()).state is SourceState.OK


async def test_every_client_has_its_own_upstream_connection() -> None:
    async with fake_engine() as engine, relayed(engine.port) as (relay, records):

        async def one(n: int) -> None:
            reader, writer = await connect(relay)
            writer.write(ask(max_tokens=n + 1, gap=0.001))
            await read_answer(reader)
            writer.close()

        await asyncio.gather(*(one(n) for n in range(20)))
        await until(lambda: len(records) == 20)
        assert engine.connections == 20
        assert sorted(r.output_tokens or 0 for r in records) == list(range(1, 21))


async def test_client_that_leaves_takes_its_request_with_it_at_once() -> None:
    async with fake_engine() as engine, relayed(engine.port) as (relay, records):
        reader, writer = await connect(relay)
        writer.write(ask(max_tokens=100, gap=60))
        await reader.readuntil(b'"content": "t"')
        assert len(relay.open_requests()) == 1
        writer.close()
        await asyncio.wait_for(engine.gone.wait(), 5)
        await until(lambda: bool(records))
        assert records[0].outcome is Outcome.CLIENT_DISCONNECT
        assert records[0].time_to_first_token_seconds is not None
        assert engine.left == 1
        await until(lambda: relay.open_requests() == [])


async def test_half_close_is_passed_on_and_the_answer_still_comes() -> None:
    received = asyncio.Event()

    async def until_eof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # to the client's FIN
        received.set()
        writer.write(b"got %d" % len(data))
        writer.close()

    async with serving(until_eof) as port, relayed(port) as (relay, _):
        reader, writer = await connect(relay)
        writer.write(b"x" * 1000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b"got 1000"
        assert received.is_set()
        writer.close()
        await until(lambda: not relay._links)


async def test_server_that_closes_is_passed_on() -> None:
    async def close_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(close_at_once) as port, relayed(port) as (relay, records):
        reader, writer = await connect(relay)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await until(lambda: not relay._links)
        assert records == []


async def test_upstream_that_breaks_off_ends_the_client_and_is_an_error() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.transport.abort()

    async with serving(break_off) as port, relayed(port) as (relay, records):
        reader, writer = await connect(relay)
        writer.write(ask())
        data = await asyncio.wait_for(reader.read(), 5)
        assert data.endswith(b"half")
        writer.close()
        await until(lambda: bool(records))
        assert [r.outcome for r in records] == [Outcome.ERROR]


@pytest.mark.parametrize("slow_side", ["client", "upstream"])
async def test_back_pressure_bounds_what_is_held(slow_side: str) -> None:
    """The fast side can push only what fits in buffers while the slow side does not read."""
    pushed = 0
    go_on = asyncio.Event()

    async def push(writer: asyncio.StreamWriter) -> None:
        nonlocal pushed
        for _ in range(640):
            writer.write(b"z" * 65_536)
            await writer.drain()
            pushed += 65_536

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if slow_side == "client":
            await push(writer)
        else:
            await go_on.wait()
            while await reader.read(1 << 20):
                pass
        writer.close()

    async with (
        serving(upstream) as port,
        relayed(port) as (relay, _),
        contextlib.AsyncExitStack() as stack,
    ):
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        plain.connect(("127.0.0.1", relay.port))
        plain.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
        pushing = push(writer) if slow_side == "upstream" else asyncio.sleep(0)
        task = await stack.enter_async_context(background(pushing))
        seen = -1
        while seen != pushed:  # until nothing moves any more
            seen = pushed
            await asyncio.sleep(0.2)
        held = sum(
            transport.get_write_buffer_size()
            for link in relay._links
            for transport in (link._client, link._upstream)
            if transport is not None
        )
        assert pushed < 640 * 65_536
        assert held < 1_000_000
        go_on.set()
        if slow_side == "upstream":
            await asyncio.wait_for(task, 20)
            writer.close()
        else:
            total = 0
            while part := await asyncio.wait_for(reader.read(1 << 20), 20):
                total += len(part)
            assert total == 640 * 65_536
            writer.close()


async def test_refused_upstream_is_a_502_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with relayed(port) as (relay, records):
        for early in (True, False):
            reader, writer = await connect(relay)
            if not early:
                await until(lambda: relay.status(0).state is SourceState.FAILED)
            writer.write(ask())
            answer = await asyncio.wait_for(read_answer(reader), 5)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 502 ")
            assert f"127.0.0.1:{port}" in json.loads(body)["error"]["message"]
            assert await reader.read() == b""
            writer.close()
        await until(lambda: len(records) == 2)
        assert [(r.outcome, r.status_code) for r in records] == [(Outcome.ERROR, 502)] * 2
        status = relay.status(time.monotonic())
        assert status.state is SourceState.FAILED
        assert f"127.0.0.1:{port}" in status.detail
        await until(lambda: not relay._links)


async def test_one_connection_too_many_is_a_503_and_a_place_is_free_again_later() -> None:
    async with fake_engine() as engine, relayed(engine.port, max_connections=2) as (relay, records):
        held = [await connect(relay) for _ in range(2)]
        await until(lambda: len(relay._links) == 2)
        reader, writer = await connect(relay)
        writer.write(ask())
        answer = await asyncio.wait_for(read_answer(reader), 5)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too many connections" in answer
        writer.close()
        await until(lambda: bool(records))
        assert records[0].outcome is Outcome.REJECTED
        assert relay.drops()["connections_refused"] == 1
        for _, other in held:
            other.close()
        await until(lambda: not relay._links)
        reader, writer = await connect(relay)
        writer.write(ask())
        assert (await asyncio.wait_for(read_answer(reader), 5)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_flood_of_connections_is_bounded() -> None:
    async with fake_engine() as engine, relayed(engine.port, max_connections=3) as (relay, _):
        sockets = [await connect(relay) for _ in range(40)]
        await until(lambda: relay.drops().get("connections_refused", 0) >= 37)
        await until(lambda: len(relay._links) <= 6)
        for _, writer in sockets:
            writer.close()
        await until(lambda: not relay._links)


class _BrokenExchange:
    """Stands for any fault of ours in measuring."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("prompt text that must not be logged")


async def test_fault_of_measuring_never_touches_the_traffic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(exchange: Any, sink: Any, drops: Any) -> Watch:
        return Watch(_BrokenExchange(), sink, drops)  # type: ignore[arg-type]

    async with fake_engine() as engine, relayed(engine.port) as (relay, records):
        monkeypatch.setattr("servoscope.sidecar.relay.source.Watch", broken)
        reader, writer = await connect(relay)
        writer.write(ask(max_tokens=50))
        answer = await asyncio.wait_for(read_answer(reader), 5)
        assert hashlib.sha256(answer).digest() == engine.sent.digest()
        writer.close()
        assert records == []
        assert relay.drops() == {"measuring_failed": 1}
    assert "prompt text" not in caplog.text


async def test_sink_that_raises_never_touches_the_traffic() -> None:
    def sink(_: RequestRecord) -> None:
        raise RuntimeError("full")

    async with fake_engine() as engine:
        relay = RelaySource("127.0.0.1", 0, "127.0.0.1", engine.port)
        async with background(relay.run(sink)):
            await asyncio.wait_for(relay.listening.wait(), 5)
            reader, writer = await connect(relay)
            for _ in range(2):
                writer.write(ask())
                assert (await asyncio.wait_for(read_answer(reader), 5)).endswith(b"0\r\n\r\n")
            writer.close()
            assert relay.drops() == {"measuring_failed": 1}


async def test_an_upstream_that_came_back_is_no_fault_though_nobody_asks_for_it() -> None:
    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with relayed(port) as (relay, records):
        reader, writer = await connect(relay)
        writer.write(ask())
        assert b" 502 " in await asyncio.wait_for(reader.readline(), 5)
        assert relay.status(time.monotonic()).state is SourceState.FAILED
        writer.close()
        server = await asyncio.start_server(closes, "127.0.0.1", port)
        async with server:
            await until(lambda: relay.status(time.monotonic()).state is not SourceState.FAILED)
        assert [r.outcome for r in records] == [Outcome.ERROR]


async def test_open_requests_end_as_errors_when_the_relay_is_stopped() -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            asked.set()
        writer.close()

    async with serving(silent) as port:
        async with relayed(port) as (relay, records):
            _, open_ = await connect(relay)
            _, left = await connect(relay)
            _, idle = await connect(relay)
            for writer in (open_, left):
                writer.write(ask())
            await until(lambda: len(relay.open_requests()) == 2)
            left.transport.abort()
            await until(lambda: len(relay.open_requests()) == 1)
        assert [r.outcome for r in records] == [Outcome.CLIENT_DISCONNECT, Outcome.ERROR]
        for writer in (open_, idle):
            writer.close()


async def test_unknown_protocols_pass_through() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data[::-1])
        writer.close()

    async with serving(echo) as port, relayed(port) as (relay, records):
        reader, writer = await connect(relay)
        for data in (b"\x16\x03\x01 tls", b"\x00\xff", b"GET / HTTP/1.1\r\n\r\n"):
            writer.write(data)
            assert await asyncio.wait_for(reader.readexactly(len(data)), 5) == data[::-1]
        writer.close()
        await until(lambda: not relay._links)
        assert records == []


async def test_port_in_use_is_a_fault_in_the_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        relay = RelaySource("127.0.0.1", port, "127.0.0.1", 1)
        assert relay.status(0).state is SourceState.FAILED
        async with background(relay.run(lambda _: None)):
            await until(lambda: "cannot listen" in relay.status(0).detail)
            assert str(port) in relay.status(0).detail


async def test_status_before_and_without_traffic() -> None:
    async with fake_engine() as engine, relayed(engine.port) as (relay, _):
        status = relay.status(time.monotonic())
        assert status.state is SourceState.IDLE
        assert str(relay.port) in status.detail
        assert status.blind_to
    assert relay.status(time.monotonic()).state is SourceState.FAILED
    assert relay.status(time.monotonic()).detail == "stopped"


def test_bad_limit_is_named() -> None:
    with pytest.raises(ValueError, match="max_connections"):
        RelaySource(max_connections=0)


@pytest.mark.parametrize("sizes", [[1] * 60, [5, 900], [100_000]])
async def test_request_cut_anyhow_is_received_when_whole(sizes: list[int]) -> None:
    async with fake_engine() as engine, relayed(engine.port) as (relay, records):
        reader, writer = await connect(relay)
        data = ask(prompt="p" * 500)
        at = 0
        for size in sizes:
            writer.write(data[at : at + size])
            at += size
            await asyncio.sleep(0)
        writer.write(data[at:])
        await read_answer(reader)
        writer.close()
        await until(lambda: bool(records))
        assert records[0].model_name == "m"
        assert records[0].outcome is Outcome.LENGTH


def test_under_uvloop() -> None:
    """The loop is the caller's choice."""
    tests: list[Callable[[], Awaitable[None]]] = [
        test_streams_byte_for_byte_and_measures,
        test_client_that_leaves_takes_its_request_with_it_at_once,
        test_half_close_is_passed_on_and_the_answer_still_comes,
        test_upstream_that_breaks_off_ends_the_client_and_is_an_error,
        test_refused_upstream_is_a_502_that_names_it,
        test_one_connection_too_many_is_a_503_and_a_place_is_free_again_later,
    ]

    async def run_all() -> None:
        for test in tests:
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_all())

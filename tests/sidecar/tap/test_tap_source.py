"""The tap on real loopback packets (needs CAP_NET_RAW), and its status without that right."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engines.background import background
from servoscope.exporters.records import Outcome, RequestRecord, SourceState
from servoscope.sidecar.tap.ring import LOOPBACK, Ring, frames
from servoscope.sidecar.tap.source import TapSource
from sidecar.wire.fake_engine import fake_engine, serving
from sidecar.wire.talk import request

pytestmark = pytest.mark.usefixtures("ended_streams")


@contextlib.asynccontextmanager
async def tapped(host: str, port: int) -> AsyncIterator[tuple[TapSource, list[RequestRecord]]]:
    """A tap of ``port`` that captures, and the records it made."""
    tap = TapSource(host, port)
    records: list[RequestRecord] = []
    async with background(tap.run(records.append)):
        await until(tap.capturing.is_set)
        yield tap, records
    assert not tap.capturing.is_set()


async def until(condition: Callable[[], bool]) -> None:
    """Wait (at most 10 s) until ``condition``."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


def ask(**body: Any) -> bytes:
    return request({"stream": True, "model": "q"} | body, headers="X-Tenant: acme\r\n")


async def one(host: str, port: int, data: bytes, end: bytes = b"\r\n0\r\n\r\n") -> None:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    await reader.readuntil(end)
    writer.close()
    await writer.wait_closed()


@pytest.mark.root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_requests_over_loopback(host: str) -> None:
    async with fake_engine(host) as engine, tapped(host, engine.port) as (tap, records):
        asks = [ask(max_tokens=n + 2, wait=0.02, gap=0.005) for n in range(20)]
        await asyncio.gather(*(one(host, engine.port, data) for data in asks))
        await until(lambda: len(records) == 20)
        assert sorted(r.output_tokens or 0 for r in records) == list(range(2, 22))
        for record in records:
            assert (record.outcome, record.tenant) == (Outcome.LENGTH, "acme")
            assert record.time_to_first_token_seconds is not None
            assert record.time_to_first_token_seconds >= 0.01
            assert record.refuse_impossible(time.time()) == []
        assert tap.drops() == {}
        status = tap.status(time.monotonic())
        assert (status.state, "lo" in status.detail) == (SourceState.OK, True)


@pytest.mark.root
async def test_wildcard_server_is_seen_on_every_address_once() -> None:
    async with fake_engine("0.0.0.0") as engine, tapped("127.0.0.1", engine.port) as (tap, records):
        assert "all interfaces" in tap.status(time.monotonic()).detail
        for host in ("127.0.0.1", "127.0.0.5", _own_address()):
            await one(host, engine.port, ask())
        await until(lambda: len(records) >= 3)
        await asyncio.sleep(0.2)
        assert [r.outcome for r in records] == [Outcome.LENGTH] * 3
        assert tap.drops() == {}


def _own_address() -> str:
    """An address of this host that is not loopback, where there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.9"
        address: str = probe.getsockname()[0]
        return address


@pytest.mark.root
async def test_client_that_leaves_and_request_in_flight_at_the_start() -> None:
    async with fake_engine() as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(ask(max_tokens=3, wait=0.5, gap=0.1))
        await reader.readuntil(b"assistant")
        async with tapped("127.0.0.1", engine.port) as (tap, records):
            await reader.readuntil(b"\r\n0\r\n\r\n")  # was in flight: in no record
            writer.write(ask(max_tokens=50, gap=60))
            await reader.readuntil(b'"content": "t"')
            await until(lambda: len(tap.open_requests()) == 1)
            writer.close()
            await until(lambda: bool(records))
            assert [r.outcome for r in records] == [Outcome.CLIENT_DISCONNECT]
            assert records[0].time_to_first_token_seconds is not None
            assert tap.drops() == {"joined_late": 1}
            assert tap.open_requests() == []


@pytest.mark.root
async def test_tls_is_named() -> None:
    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)

    async with serving(read_all) as port, tapped("127.0.0.1", port) as (tap, records):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01\x00\x05hello")
        await until(lambda: "tls" in tap.drops())
        writer.close()
        status = tap.status(time.monotonic())
        assert status.state is SourceState.FAILED
        assert "TLS" in status.detail
        assert records == []


@pytest.mark.root
async def test_server_that_starts_listening_later_on_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servoscope.sidecar.tap.source._LOOK_AGAIN_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with tapped("127.0.0.1", port) as (tap, _):
        assert "lo" in tap.status(0).detail
        with socket.create_server(("0.0.0.0", port)):
            await until(lambda: "all interfaces" in tap.status(0).detail)


@pytest.mark.root
def test_ring_counts_every_packet_and_stamps_them_now() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        begin = time.time()
        with Ring(LOOPBACK, port) as ring, socket.create_connection(("127.0.0.1", port)) as client:
            peer, _ = server.accept()
            with peer:
                for n in range(200):
                    client.sendall(b"%03d" % n)
                    assert peer.recv(100)
                times: list[float] = []
                while (block := ring.take_block(0.5)) is not None:
                    times += [at for _, _, at in frames(block)]
                packets, dropped = ring.statistics()
        assert dropped == 0
        assert packets == len(times) >= 200
        assert times == sorted(times)
        assert begin - 1 < times[0] <= times[-1] < time.time() + 1


@pytest.mark.root
def test_interface_that_does_not_exist() -> None:
    with pytest.raises(OSError, match="No such device"):
        Ring("no-such-if", 8000)


async def test_without_the_right_the_status_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("servoscope.sidecar.tap.source.Ring", refuse)
    monkeypatch.setattr(
        "servoscope.sidecar.tap.source.tap_missing", lambda *_: "the right: sudo setcap"
    )
    tap = TapSource("127.0.0.1", 8000)
    assert tap.status(0).state is SourceState.FAILED
    async with background(tap.run(lambda _: None)):
        await until(lambda: "sudo setcap" in tap.status(0).detail)
        assert tap.status(0).state is SourceState.FAILED
        assert list(tap.open_requests()) == []


async def test_fault_of_ours_is_a_status_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("prompt text that must not be logged")

    monkeypatch.setattr("servoscope.sidecar.tap.source.Ring", broken)
    tap = TapSource("127.0.0.1", 8000)
    async with background(tap.run(lambda _: None)):
        await until(lambda: tap.drops().get("capture_failed", 0) > 0)
        assert "ZeroDivisionError" in tap.status(0).detail
        assert "prompt text" not in caplog.text

"""The OTLP receiver: real HTTP, captured spans; what it takes, refuses and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from engines.background import background
from exporters.otlp_bytes import captured_spans, encode
from servoscope.exporters.records import Outcome, RequestRecord, Source, SourceState
from servoscope.exporters.sglang.settings import Settings
from servoscope.exporters.sglang.spans import Assembler
from servoscope.sidecar.sources.otlp import PATH, OtlpSource

PROTOBUF = {"Content-Type": "application/x-protobuf"}


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0.01)


async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the other side has closed, without a word."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Bench:
    def __init__(self, **options: Any) -> None:
        self.found: list[RequestRecord] = []
        self.settings = Settings(trace=True)
        self.source = OtlpSource("127.0.0.1", 0, settings=lambda: self.settings, **options)

    async def post(
        self, body: bytes | io.BytesIO, path: str = PATH, headers: dict[str, str] = PROTOBUF
    ) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.source.port}{path}"
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            return answer.status, await answer.read()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    async with background(bench.source.run(bench.found.append)):
        await until(lambda: "no spans" in (bench.source.missing() or "no spans"))
        yield


async def test_requests_come_out_of_what_an_exporter_sends() -> None:
    extra: list[RequestRecord] = []
    bench = Bench(also=extra.append)
    assert bench.source.missing() == "not started"
    async with running(bench):
        state = bench.source.status(0.0)
        assert state.state is SourceState.IDLE
        assert f"--otlp-traces-endpoint http://127.0.0.1:{bench.source.port}/v1/traces" in (
            state.detail
        )
        assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in state.detail
        spans = captured_spans()
        for start in range(0, len(spans), 7):
            assert await bench.post(encode(spans[start : start + 7])) == (200, b"")
        assert len(bench.found) == 6
        assert {r.source for r in bench.found} == {Source.OTLP}
        assert {r.outcome for r in bench.found} == {Outcome.LENGTH}
        assert bench.source.missing() is None
        assert await bench.post(encode(spans)) == (200, b"")  # an answer that was lost
        assert len(bench.found) == 6
        assert bench.source.drops()["duplicate_span"] > 0
        assert [r.request_id for r in extra] == [r.request_id for r in bench.found]
        assert all(a is not b for a, b in zip(extra, bench.found, strict=True))
        bench.settings = Settings(trace=False)  # an engine that was started anew without spans
        assert "no spans have come" in (bench.source.missing() or "")
    assert bench.source.missing() == "stopped"


async def test_a_compressed_body_is_taken() -> None:
    bench = Bench()
    async with running(bench):
        body = gzip.compress(encode(captured_spans()))
        assert (await bench.post(body, headers=PROTOBUF | {"Content-Encoding": "gzip"}))[0] == 200
        assert len(bench.found) == 6


async def test_what_is_not_a_trace_request_is_refused_and_counted() -> None:
    bench = Bench()
    async with running(bench):
        whole = encode(captured_spans())
        assert (await bench.post(whole[:-5]))[0] == 400
        assert (await bench.post(b"{}", headers={"Content-Type": "application/json"}))[0] == 415
        assert (await bench.post(whole, path="/v1/metrics"))[0] == 404
        assert (await bench.post(io.BytesIO(b"\0" * (5 * 1024 * 1024))))[0] == 413
        bomb = gzip.compress(b"\0" * (64 * 1024 * 1024))
        status, _ = await bench.post(bomb, headers=PROTOBUF | {"Content-Encoding": "gzip"})
        assert status in (400, 413)
        named = PROTOBUF | {"Host": "evil.example"}
        assert (await bench.post(whole, headers=named))[0] == 421
        drops = bench.source.drops()
        assert (drops["garbage_body"], drops["not_protobuf"], drops["refused_host"]) == (1, 1, 1)
        assert drops["oversize_body"] >= 1
        assert bench.found == []
        assert (await bench.post(encode([], scope="other")))[0] == 200
        assert bench.source.missing() is not None  # not a span of SGLang's yet
        assert (await bench.post(whole))[0] == 200
        assert len(bench.found) == 6


@pytest.mark.parametrize(
    ("first", "kind", "said"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "grpc", "gRPC"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"CANARY", "tls", "TLS"),
    ],
)
async def test_what_speaks_something_else_is_told_what_to_set(
    first: bytes, kind: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's exporter speaks gRPC unless told otherwise: its operator has to learn why nothing
    comes, in one line and not at each try."""
    bench = Bench()
    async with running(bench):
        for pieces in ([first], [first[:1], first[1:]], [first[:2], first[2:9], first[9:]]):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.source.port)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            await gone(reader, writer)
        assert bench.source.drops() == {f"{kind}_connection": 3}
        (line,) = [r.getMessage() for r in caplog.records]
        assert f"in {said}" in line
        assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in line
        assert said in bench.source.status(0.0).detail
        assert (await bench.post(encode(captured_spans())))[0] == 200
        assert len(bench.found) == 6
        assert bench.source.missing() is None
    assert "CANARY" not in caplog.text


async def test_connections_that_say_nothing_are_closed_at_the_end() -> None:
    bench = Bench()
    async with running(bench):
        silent = [await asyncio.open_connection("127.0.0.1", bench.source.port) for _ in range(20)]
        silent[0][1].write(b"P")
        silent[1][1].close()
        await silent[1][1].wait_closed()
        assert (await bench.post(encode(captured_spans())))[0] == 200
    for reader, writer in (silent[0], *silent[2:]):
        await gone(reader, writer)


GZIP = gzip.compress(b"\0" * 99)


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", b"no gzip", 400),
        ("gzip", GZIP[:-9], 400),
        ("gzip", GZIP + GZIP, 400),
        ("gzip", b"", 400),
        ("deflate", b"no deflate", 400),
        ("zstd", b"x", 400),
        ("snappy", b"x", 400),
        ("gzip, gzip", gzip.compress(GZIP), 400),
        ("gzip", gzip.compress(b"\0" * (4 * 1024 * 1024 + 1)), 413),
        ("deflate", zlib.compress(b"\0" * 9_000_000), 413),
    ],
)
async def test_a_compressed_body_that_cannot_be_is_refused_in_one_count_and_no_line(
    coding: str, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    async with running(bench):
        assert (await bench.post(body, headers=PROTOBUF | {"Content-Encoding": coding}))[
            0
        ] == status
        reason = "garbage_body" if status == 400 else "oversize_body"
        assert bench.source.drops() == {reason: 1}
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


async def test_what_stays_incomplete_is_told_in_time_as_unknown() -> None:
    bench = Bench(assembler=Assembler(settle_seconds=0.1, lost_root_seconds=0.2))
    spans = [s for s in captured_spans() if " Req " not in s["name"]]
    async with running(bench):
        await bench.post(encode(spans))
        await until(lambda: len(bench.found) == 6)
    assert {r.outcome for r in bench.found} == {Outcome.UNKNOWN}
    assert {r.e2e_seconds for r in bench.found} == {None}


async def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        source = OtlpSource("127.0.0.1", taken.getsockname()[1])
        async with background(source.run(lambda _: None)):
            await until(lambda: "cannot listen" in (source.missing() or ""))
            assert source.status(0.0).state is SourceState.FAILED


def test_it_says_what_it_cannot_see() -> None:
    blind = " ".join(Bench().source.status(0.0).blind_to)
    assert "streaming" in blind
    assert "not sampled" in blind
    assert list(Bench().source.open_requests()) == []

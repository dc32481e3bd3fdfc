"""The OTLP receiver: real HTTP, captured spans; what it takes, refuses and bounds."""

from __future__ import annotations

import asyncio
import gzip
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

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

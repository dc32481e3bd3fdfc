"""A small fake vLLM over HTTP, in this process, and finished requests to count."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.sidecar.attach import processes

NOW = 1_800_000_000.0


class FakeEngine:
    """Answers what a vLLM answers; ``mode`` says how /metrics misbehaves."""

    def __init__(self) -> None:
        self.mode = "good"
        self.body = b""  # of mode "bytes"
        self.hits: dict[str, int] = {}
        self.prompt_tokens = 100.0
        self.generated_tokens = 50.0
        self.stopped = 3.0  # requests that finished with "stop"
        self.running = 0.0
        self.version = "0.32.0"
        self.model_name = "tiny"
        self.paths: dict[str, Any] = {}  # overrides: path -> JSON value or None for 404
        self.statuses: dict[str, int] = {}  # path -> status of an error
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        if ":" in host:  # as engines do: both families on one socket; asyncio would not
            both = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
            self._server = await asyncio.start_server(self._serve, sock=both)
        else:
            self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def restart_counters(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.stopped = 0.0

    def metrics(self) -> str:
        at = f'engine="0",model_name="{self.model_name}"'
        nan = "NaN" if self.mode == "nan" else str(self.running)
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{at}}} {nan}\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{{{at}}} 0.0\n"
            "# TYPE vllm:kv_cache_usage_perc gauge\n"
            f"vllm:kv_cache_usage_perc{{{at}}} 0.25\n"
            "# TYPE vllm:prompt_tokens_total counter\n"
            f"vllm:prompt_tokens_total{{{at}}} {self.prompt_tokens}\n"
            "# TYPE vllm:generation_tokens_total counter\n"
            f"vllm:generation_tokens_total{{{at}}} {self.generated_tokens}\n"
            "# TYPE vllm:request_success_total counter\n"
            f'vllm:request_success_total{{{at},finished_reason="stop"}} {self.stopped}\n'
            f'vllm:request_success_total{{{at},finished_reason="abort"}} 0.0\n'
            "# TYPE vllm:e2e_request_latency_seconds histogram\n"
            f'vllm:e2e_request_latency_seconds_bucket{{{at},le="1.0"}} {self.stopped}\n'
            f'vllm:e2e_request_latency_seconds_bucket{{{at},le="+Inf"}} {self.stopped}\n'
            f"vllm:e2e_request_latency_seconds_sum{{{at}}} {self.stopped / 2}\n"
            f"vllm:e2e_request_latency_seconds_count{{{at}}} {self.stopped}\n"
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                self.hits[path] = self.hits.get(path, 0) + 1
                await self._answer(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            await self._metrics(writer)
            return
        known: dict[str, Any] = {
            "/version": {"version": self.version},
            "/v1/models": {
                "data": [{"id": self.model_name, "owned_by": "vllm", "root": "/nowhere"}]
            },
            **self.paths,
        }
        if path in self.statuses:
            await self._send(writer, self.statuses[path], b"{}")
        elif known.get(path) is None:
            await self._send(writer, 404, b"{}")
        else:
            await self._send(writer, 200, json.dumps(known[path]).encode())

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        if self.mode == "500":
            await self._send(writer, 500, b"broken")
        elif self.mode == "501":
            await self._send(writer, 501, b"off")
        elif self.mode == "garbage":
            await self._send(writer, 200, bytes(range(256)) * 20)
        elif self.mode == "bytes":
            await self._send(writer, 200, self.body)
        elif self.mode == "empty":
            await self._send(writer, 200, b"")
        elif self.mode == "vanish":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nvllm:")
            await writer.drain()
            writer.close()
        elif self.mode in ("huge", "slow"):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            piece = b"x" * 65536 if self.mode == "huge" else b"x"
            for _ in range(100_000):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0.02 if self.mode == "slow" else 0)
        else:
            await self._send(writer, 200, self.metrics().encode())

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    """A running fake vLLM. Its process is this one: pytest's arguments are not an engine's."""
    found = processes.server_processes

    def with_plain_arguments(*args: Any) -> list[processes.ServerProcess]:
        return [replace(p, argv=("vllm", "serve")) for p in found(*args)]

    monkeypatch.setattr(processes, "server_processes", with_plain_arguments)
    fake = FakeEngine()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    """Builds a plausible finished request; keywords change it."""
    numbers = iter(range(10**9))

    def make(**changes: Any) -> RequestRecord:
        values: dict[str, Any] = {
            "request_id": f"cmpl-{next(numbers)}",
            "source": Source.PLUGIN,
            "outcome": Outcome.COMPLETED,
            "phase": Phase.DECODE,
            "streaming": True,
            "received_unix_seconds": NOW - 2.0,
            "first_token_unix_seconds": NOW - 1.5,
            "finished_unix_seconds": NOW,
            "queue_seconds": 0.1,
            "prefill_seconds": 0.4,
            "decode_seconds": 1.5,
            "time_to_first_token_seconds": 0.5,
            "time_per_output_token_seconds": 0.05,
            "e2e_seconds": 2.0,
            "prompt_tokens": 100,
            "output_tokens": 31,
            "cached_tokens": 64,
        }
        return RequestRecord(**(values | changes))

    return make


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """State and runtime directories of this test alone."""
    state, run = tmp_path / "state", tmp_path / "run"
    monkeypatch.setenv("SERVOSCOPE_STATE", str(state))
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(run))
    return state, run


@pytest_asyncio.fixture
async def ended_streams(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What a failed test leaves open is closed here: collected later, it would be the fault of
    some other test."""
    writers: list[asyncio.StreamWriter] = []
    servers: list[asyncio.Server] = []
    connect = asyncio.open_connection

    async def open_connection(*args: Any, **named: Any) -> Any:
        reader, writer = await connect(*args, **named)
        writers.append(writer)
        return reader, writer

    def noted(start: Callable[..., Any]) -> Callable[..., Any]:
        async def started(serve: Callable[..., Any], *args: Any, **named: Any) -> asyncio.Server:
            async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writers.append(writer)
                await serve(reader, writer)

            server: asyncio.Server = await start(served, *args, **named)
            servers.append(server)
            return server

        return started

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    for name in ("start_server", "start_unix_server"):
        monkeypatch.setattr(asyncio, name, noted(getattr(asyncio, name)))
    yield
    for server in servers:
        server.close()
    for writer in writers:
        writer.transport.abort()
    for _ in range(3):  # the loop tells each transport, and its reader, in its next turns
        await asyncio.sleep(0)

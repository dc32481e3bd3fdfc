"""A small HTTP/1.1 server that answers like an OpenAI engine, for relay and tap tests.

The request's JSON says what to do: ``stream``, ``max_tokens``, ``gap`` (seconds between tokens),
``wait`` (seconds before the first), ``pad`` (bytes of text a token).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from sidecar.wire.talk import DONE, END, chunk, delta, event, stream_head, usage, whole


class FakeEngine:
    """Counts what it saw: requests, clients that left, and a digest of all bytes each way."""

    def __init__(self) -> None:
        self.port = 0
        self.requests = 0
        self.left = 0
        self.connections = 0
        self.sent = hashlib.sha256()
        self.received = hashlib.sha256()
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, keep-alive."""
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(length)
                self.received.update(head + body)
                self.requests += 1
                await self._answer(json.loads(body or b"{}"), reader, writer)

    async def _answer(
        self, ask: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        count = ask.get("max_tokens", 3)
        if not ask.get("stream"):
            await asyncio.sleep(ask.get("wait", 0))
            choices = [{"index": 0, "text": "x", "finish_reason": "stop"}]
            await self._send(writer, whole(usage(5, count) | {"choices": choices}))
            return
        await self._send(writer, stream_head() + chunk(event(delta(role="assistant", content=""))))
        await self._pause(ask.get("wait", 0), reader)
        token = chunk(event(delta(content="t" * ask.get("pad", 1))))
        for n in range(count):
            if n:
                await self._pause(ask.get("gap", 0), reader)
            await self._send(writer, token)
        end = chunk(event(delta(finish="length"))) + chunk(event(usage(5, count, 4)))
        await self._send(writer, end + DONE + END)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        self.sent.update(data)
        writer.write(data)
        await writer.drain()

    async def _pause(self, seconds: float, reader: asyncio.StreamReader) -> None:
        """Wait, and notice a client that leaves meanwhile, as engines do."""
        if not seconds:
            return
        try:
            async with asyncio.timeout(seconds):
                await reader.read(1)
        except TimeoutError:
            return
        self.left += 1
        self.gone.set()
        raise ConnectionResetError


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """``handler`` on a free port; on exit every connection is really closed."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            with contextlib.suppress(ConnectionError):
                await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            handlers.discard(task)

    server = await asyncio.start_server(handle, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        if handlers:
            _, left = await asyncio.wait(handlers, timeout=2)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


@asynccontextmanager
async def fake_engine(host: str = "127.0.0.1") -> AsyncIterator[FakeEngine]:
    """A FakeEngine that serves on a free port."""
    engine = FakeEngine()
    async with serving(engine.serve, host) as engine.port:
        yield engine

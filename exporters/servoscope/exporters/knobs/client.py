"""Sidecar side of a knobs socket: what can be set on this rank, setting it, reading it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from servoscope.exporters.knobs.reading import KnobState, number, state_from_message
from servoscope.exporters.plugin.hello import Hello, ProtocolError, hello_from_message
from servoscope.exporters.plugin.lines import LineDecoder, encode_line
from servoscope.exporters.plugin.sockets import connect, sockets_of

__all__ = ["KnobClient", "KnobRefused", "find_knob_sockets"]

ANSWER_SECONDS = 5.0
READ_BYTES = 65536


class KnobRefused(RuntimeError):  # noqa: N818 - the engine answered, it is no error of the link
    """The engine said no: value out of bounds, lease held by another, knob not live."""


def find_knob_sockets(run_dirs: Iterable[Path], pids: Iterable[int]) -> list[Path]:
    """Knobs sockets of these processes, all ranks."""
    return sockets_of(run_dirs, pids, "knobs-{pid}-dp*.sock")


class KnobClient:
    """One rank. Make it with ``await KnobClient.connect(path)``.

    Methods raise KnobRefused when the engine says no, ProtocolError when it answers nonsense,
    ConnectionError when it is gone, TimeoutError when it does not answer in ANSWER_SECONDS.
    """

    def __init__(
        self, path: Path, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.path = path
        self.hello = hello
        self._reader = reader
        self._writer = writer
        self._decoder = LineDecoder()
        self._ready: list[dict[str, Any]] = []
        self._one = asyncio.Lock()
        self._ident = 0
        self._broken = ""

    @classmethod
    async def connect(cls, path: Path) -> KnobClient:
        """Connect and check the hello. Raises OSError, ProtocolError."""
        peer = connect(path)
        peer.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=peer)
        client = cls(path, _NO_HELLO, reader, writer)
        try:
            first = await asyncio.wait_for(client._read(), ANSWER_SECONDS)
            client.hello = hello_from_message(first)
        except TimeoutError:
            await client.aclose()
            raise ProtocolError(f"no hello within {ANSWER_SECONDS:g} s") from None
        except BaseException:
            await client.aclose()
            raise
        return client

    async def get(self) -> KnobState:
        """Everything about this rank, now."""
        return state_from_message(await self._ask("state", op="get"))

    async def lease(self, owner: str, ttl_s: float = 30.0) -> float:
        """Take the lease; returns the seconds granted (30 at most)."""
        return _granted(await self._ask("leased", op="lease", owner=owner, ttl_s=ttl_s))

    async def renew(self) -> float:
        """Start the lease's time anew."""
        return _granted(await self._ask("leased", op="renew"))

    async def set(self, values: Mapping[str, float]) -> dict[str, float]:
        """Set knobs, all or nothing; returns the values the next step uses (read-back)."""
        answer = await self._ask("set", op="set", values=dict(values))
        applied = answer.get("applied")
        if not isinstance(applied, dict):
            raise ProtocolError("set: applied is missing")
        try:
            return {name: number(value) for name, value in applied.items()}
        except ValueError as error:
            raise ProtocolError(f"set: applied: {error}") from error

    async def release(self) -> None:
        """Give the lease back: boot values at once."""
        await self._ask("released", op="release")

    async def bypass(self, on: bool) -> None:
        """Let the wrapper pass straight through, to measure its cost."""
        await self._ask("bypassed", op="bypass", on=on)

    async def aclose(self) -> None:
        """Close. A lease that is held runs out by itself."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _ask(self, wanted: str, **request: Any) -> dict[str, Any]:
        async with self._one:
            if self._broken:
                raise ConnectionError(self._broken)
            self._ident += 1
            self._writer.write(encode_line({"id": self._ident, **request}))
            try:
                await self._writer.drain()
                answer = await asyncio.wait_for(self._answer(self._ident), ANSWER_SECONDS)
            except BaseException as error:
                # The next answer on this connection might be this question's: do not go on.
                self._broken = f"{self.path.name}: {error!r}"[:300]
                raise
        if answer.get("type") in ("refused", "error"):
            raise KnobRefused(str(answer.get("why", "no reason given"))[:500])
        if answer.get("type") != wanted:
            raise ProtocolError(f"answer is {answer.get('type')!r}, not {wanted}"[:200])
        return answer

    async def _answer(self, ident: int) -> dict[str, Any]:
        while True:
            message = await self._read()
            if message.get("id") == ident:
                return message

    async def _read(self) -> dict[str, Any]:
        while not self._ready:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionError(f"{self.path.name}: the engine closed the knobs socket")
            self._ready = self._decoder.feed(data)
            if self._decoder.garbage + self._decoder.oversize:
                raise ProtocolError(f"{self.path.name}: a line that is no JSON object")
        return self._ready.pop(0)


def _granted(answer: Mapping[str, Any]) -> float:
    try:
        return number(answer.get("ttl_s"))
    except ValueError as error:
        raise ProtocolError(f"leased: ttl_s: {error}") from error


_NO_HELLO = Hello(
    protocol=0, version="", engine="", engine_version="", boot_id="", pid=0
)  # replaced by connect before anybody sees it

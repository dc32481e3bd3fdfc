"""The wait in the socket, on real connections and on what is none."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.vllm.socket_wait import MAX_WAIT_SECONDS, seconds_in_socket, wait_of


class Cycle(asyncio.Protocol):
    """As uvicorn's: ``receive`` is a method of what holds the transport."""

    transport: asyncio.BaseTransport | None = None

    def __init__(self, busy_seconds: float, waits: list[float]) -> None:
        self._busy_seconds, self._waits = busy_seconds, waits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, _data: bytes) -> None:
        time.sleep(self._busy_seconds)
        self._waits.append(seconds_in_socket(self.receive))

    async def receive(self) -> Any:
        """Not called."""


async def waits(requests: int, busy_seconds: float, path: Path | None = None) -> list[float]:
    """One connection that is kept, and what was read for each request on it."""
    loop, found = asyncio.get_running_loop(), list[float]()

    def made() -> Cycle:
        return Cycle(busy_seconds, found)

    if path is None:
        server = await loop.create_server(made, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    else:
        server = await loop.create_unix_server(made, str(path))
        _, writer = await asyncio.open_unix_connection(str(path))
    async with server:
        for sent in range(requests):
            writer.write(b"POST")
            async with asyncio.timeout(20):
                while len(found) <= sent:  # noqa: ASYNC110 - whatever the machine does
                    await asyncio.sleep(0.1)  # longer than a wait: an earlier one must not count
        writer.close()
        await writer.wait_closed()
    return found


async def test_the_time_in_the_socket_of_each_request_on_a_kept_connection() -> None:
    found = await waits(3, busy_seconds=0.06)
    assert len(found) == 3
    assert all(0.05 <= wait < 5.0 for wait in found)


async def test_a_unix_socket_does_not_tell(tmp_path: Path) -> None:
    assert await waits(1, busy_seconds=0.06, path=tmp_path / "s") == [0.0]


@pytest.mark.parametrize("extra", [None, object(), "text", 3])
def test_what_is_no_socket_does_not_tell(extra: Any) -> None:
    class Holder:
        class transport:  # noqa: N801 - as it is called in uvicorn
            @staticmethod
            def get_extra_info(_name: str) -> Any:
                return extra

        async def receive(self) -> Any:
            """Not called."""

    assert seconds_in_socket(Holder().receive) == 0.0


def test_a_receive_of_another_server_and_a_closed_socket_do_not_tell() -> None:
    async def receive() -> Any:
        """Not called."""

    assert seconds_in_socket(receive) == 0.0
    closed = socket.socket()
    closed.close()

    class Holder:
        class transport:  # noqa: N801
            @staticmethod
            def get_extra_info(_name: str) -> Any:
                return closed

        async def receive(self) -> Any:
            """Not called."""

    assert seconds_in_socket(Holder().receive) == 0.0


@given(st.binary(max_size=300))
def test_whatever_a_kernel_says_is_a_wait_or_none(info: bytes) -> None:
    wait = wait_of(info)
    assert 0.0 <= wait <= MAX_WAIT_SECONDS
    if wait:
        assert round(wait * 1e3) == struct.unpack_from("=I", info, 52)[0]


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, 0.0), (4, 0.0), (5, 0.005), (250, 0.25), (0xFFFFFFFF, 0.0)]
)
def test_less_than_a_tick_and_more_than_can_be_are_none(milliseconds: int, seconds: float) -> None:
    assert wait_of(bytes(52) + struct.pack("=I", milliseconds) + bytes(40)) == seconds

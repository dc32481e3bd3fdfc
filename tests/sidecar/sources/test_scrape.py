"""Reading /metrics of an engine that misbehaves: five states, none taken for another."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.records import EngineSample, Reading, Refused, SourceState
from servoscope.sidecar.sources.scrape import Fetched, ScrapeState, fetch

NOW = 1_800_000_000.0  # by the wall clock


async def fetched(url: str, seconds: float = 5.0, max_bytes: int = 100_000) -> Fetched:
    async with aiohttp.ClientSession() as session:
        return await fetch(session, f"{url}/metrics", timeout_seconds=seconds, max_bytes=max_bytes)


async def test_a_good_answer(engine: Any) -> None:
    found = await fetched(engine.url)
    assert found.text is not None
    assert b"vllm:prompt_tokens_total" in found.text
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("mode", "reason", "answered"),
    [("500", "http_500", True), ("501", "http_501", True), ("huge", "too_large", True),
     ("vanish", "connection", True)],
)  # fmt: skip
async def test_bad_answers_have_a_reason(
    engine: Any, mode: str, reason: str, answered: bool
) -> None:
    engine.mode = mode
    found = await fetched(engine.url)
    assert (found.text, found.reason, found.answered) == (None, reason, answered)
    assert found.detail


async def test_501_says_what_to_do(engine: Any) -> None:
    engine.mode = "501"
    assert "--metrics" in (await fetched(engine.url)).detail


async def test_a_slow_drip_ends_at_the_time_limit(engine: Any) -> None:
    engine.mode = "slow"
    found = await fetched(engine.url, seconds=0.3)
    assert (found.text, found.reason) == (None, "timeout")
    assert found.seconds < 5.0


async def test_nobody_there(unused_tcp_port: int) -> None:
    found = await fetched(f"http://127.0.0.1:{unused_tcp_port}")
    assert (found.reason, found.answered) == ("refused", False)


@asynccontextmanager
async def answering(
    pieces: Sequence[bytes], head: str = "", pause_seconds: float = 0.0
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that says what it is told to; its URL, and the requests that came."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"HTTP/1.1 200 OK\r\n{head}Connection: close\r\n\r\n".encode())
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_seconds)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the reader has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


GZIP = "Content-Encoding: gzip\r\n"
TEXT = b"vllm:num_requests_running 1\n" * 50


async def test_it_asks_for_no_packing_and_hands_on_bytes_as_they_came() -> None:
    bad = b'vllm:num_requests_running{model_name="\xff\xfe"} 1\n'
    async with answering([bad]) as (url, asked):
        found = await fetched(url)
    assert found.text == bad
    assert b"accept-encoding: identity\r\n" in asked[0].lower()


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP"])
async def test_an_answer_packed_all_the_same_is_read(coding: str) -> None:
    packed = gzip.compress(TEXT)
    async with answering([packed[:7], packed[7:]], f"Content-Encoding: {coding}\r\n") as (url, _):
        assert (await fetched(url)).text == TEXT


async def test_identity_is_no_packing() -> None:
    async with answering([TEXT], "Content-Encoding: identity\r\n") as (url, _):
        assert (await fetched(url)).text == TEXT


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        ("Content-Encoding: br\r\n", TEXT, "'br', which was not asked for"),
        ("Content-Encoding: deflate\r\n", zlib.compress(TEXT), "'deflate'"),
        (f"{GZIP}{GZIP}", gzip.compress(gzip.compress(TEXT)), "'gzip, gzip'"),
        (GZIP, TEXT, "gzip is damaged"),
        (GZIP, gzip.compress(TEXT)[:-9], "gzip is cut off"),
        (GZIP, b"", "gzip is cut off"),
    ],
)
async def test_packing_that_cannot_be_undone_has_a_reason(
    head: str, body: bytes, words: str
) -> None:
    async with answering([body], head) as (url, _):
        found = await fetched(url)
    assert (found.text, found.reason, found.answered) == (None, "encoding", True)
    assert words in found.detail


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(b"0" * 50_000_000),
        gzip.compress(b"0" * 100_001),
        gzip.compress(b"") * 5_001,  # nothing in it, and it does not end
    ],
    ids=["bomb", "one byte too many", "empty members"],
)
async def test_a_small_answer_that_unpacks_to_much_is_cut(body: bytes) -> None:
    async with answering([body], GZIP) as (url, _):
        found = await fetched(url)
    assert (found.text, found.reason, found.answered) == (None, "too_large", True)


async def test_as_much_as_allowed_is_read() -> None:
    async with answering([gzip.compress(b"0" * 100_000)], GZIP) as (url, _):
        assert (await fetched(url)).text == b"0" * 100_000


@pytest.mark.parametrize(
    ("head", "pieces"),
    [("", [b"x"] * 1_000), (GZIP, [bytes([b]) for b in gzip.compress(random.randbytes(1_000))])],
    ids=["plain", "gzip"],
)
async def test_a_drip_from_a_server_ends_at_the_time_limit(head: str, pieces: list[bytes]) -> None:
    async with answering(pieces, head, pause_seconds=0.02) as (url, _):
        found = await fetched(url, seconds=0.2)
    assert (found.text, found.reason, found.answered) == (None, "timeout", True)


async def test_a_head_that_never_ends_is_no_answer() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while not reader.at_eof():
                writer.write(b"x: 1\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await fetched(url, seconds=0.2)
    finally:
        server.close()
    assert (found.text, found.reason, found.answered) == (None, "timeout", False)


GOOD = EngineSample(engine="vllm", version="1", readings=(Reading("running", 0.0),))
NOTHING = EngineSample(engine="vllm", version="1", readings=())
PARTLY = EngineSample(
    engine="vllm",
    version="1",
    readings=(Reading("waiting", 1.0),),
    refused=(Refused("running", "NaN", "not a finite number"),),
)


def state(**changes: float) -> ScrapeState:
    settings = {"interval_seconds": 5.0, "max_interval_seconds": 60.0, "cost_ratio": 0.05}
    return ScrapeState(**{**settings, **changes})


def test_idle_and_ok_are_healthy_and_not_the_same() -> None:
    subject = state()
    subject.read(Fetched(b"x", 0.01), GOOD, busy=False, now=100.0, at=NOW)
    assert subject.status(101.0).state is SourceState.IDLE
    subject.read(Fetched(b"x", 0.01), GOOD, busy=True, now=105.0, at=NOW)
    assert subject.status(106.0).state is SourceState.OK


def test_failed_is_not_idle_although_the_last_reading_is_fresh() -> None:
    subject = state()
    subject.read(Fetched(b"x", 0.01), GOOD, busy=False, now=100.0, at=NOW)
    subject.failed(Fetched(None, 0.01, "http_500", "HTTP 500"), 101.0)
    status = subject.status(101.0)
    assert (status.state, status.detail) == (SourceState.FAILED, "HTTP 500")
    assert status.last_success_unix_seconds == NOW
    assert subject.errors == {"http_500": 1}
    assert subject.up


def test_stale_is_answers_without_a_good_reading_for_too_long() -> None:
    subject = state()
    subject.read(Fetched(b"x", 0.01), GOOD, busy=False, now=100.0, at=NOW)
    for now in (105.0, 110.0, 115.0, 120.0):
        subject.read(Fetched(b"", 0.01), NOTHING, busy=False, now=now, at=NOW)
    assert subject.status(110.0).state is SourceState.IDLE
    status = subject.status(120.0)
    assert status.state is SourceState.STALE
    assert "20 s" in status.detail


def test_an_engine_that_never_said_anything_becomes_stale() -> None:
    subject = state()
    subject.read(Fetched(b"", 0.01), NOTHING, busy=False, now=100.0, at=NOW)
    assert subject.status(200.0).state is SourceState.STALE


def test_bad_values_name_the_key_and_the_others_still_count() -> None:
    subject = state()
    subject.read(Fetched(b"x", 0.01), PARTLY, busy=True, now=100.0, at=NOW)
    status = subject.status(100.0)
    assert status.state is SourceState.BAD_VALUE
    assert "running=NaN" in status.detail
    assert status.last_success_unix_seconds == NOW


def test_garbage_is_a_bad_value_not_silence() -> None:
    subject = state()
    subject.read(Fetched(b"<html>", 0.01), NOTHING, busy=False, now=100.0, at=NOW)
    assert subject.status(100.0).state is SourceState.BAD_VALUE


def test_it_backs_off_while_it_fails_and_comes_back_at_once() -> None:
    subject = state()
    intervals = []
    for i in range(8):
        subject.failed(Fetched(None, 0.01, "refused", "x", answered=False), 100.0 + i)
        intervals.append(subject.next_interval())
    assert intervals == [10.0, *[15.0] * 7]  # an engine that came back is seen within 15 s
    assert subject.up is False
    subject.read(Fetched(b"x", 0.01), GOOD, busy=False, now=120.0, at=NOW)
    assert subject.next_interval() == 5.0


def test_an_expensive_read_is_made_less_often() -> None:
    subject = state()
    subject.read(Fetched(b"x", 0.6), GOOD, busy=True, now=100.0, at=NOW)
    assert subject.next_interval() == pytest.approx(12.0)  # 5 % of the time
    subject.read(Fetched(b"x", 100.0), GOOD, busy=True, now=200.0, at=NOW)
    assert subject.next_interval() == 60.0


def test_what_the_parser_costs_counts_like_the_fetch() -> None:
    subject = state()
    read = Fetched(b"x", 0.2).and_reading(0.4)
    subject.read(read, GOOD, busy=True, now=100.0, at=NOW)
    assert subject.next_interval() == pytest.approx(12.0)
    assert subject.status(100.0).read_seconds == pytest.approx(0.6)
    assert Fetched(b"x", 0.2).and_reading(-1.0).seconds == 0.2  # a clock that was changed


@given(st.lists(st.tuples(st.sampled_from("fgnp"), st.floats(0, 10)), max_size=40))
def test_the_interval_stays_in_its_bounds(steps: list[tuple[str, float]]) -> None:
    subject = state()
    now = 100.0
    for kind, seconds in steps:
        now += seconds
        if kind == "f":
            subject.failed(Fetched(None, seconds, "timeout", "x"), now)
        else:
            sample = {"g": GOOD, "n": NOTHING, "p": PARTLY}[kind]
            subject.read(Fetched(b"x", seconds), sample, busy=False, now=now, at=NOW)
        assert 5.0 <= subject.next_interval() <= 60.0
        assert subject.status(now).state in set(SourceState)

"""The load client against a server whose delays and faults are known."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from servoscope.exporters.records import Outcome
from servoscope.lab.client import (
    CHAT,
    COMPLETIONS,
    Limits,
    Observed,
    PlannedRequest,
    RemoteTargetError,
    check_target,
    run_closed,
    run_open,
)

FIRST_SECONDS = 0.12
GAP_SECONDS = 0.04
TOKENS = 6


class FakeEngine:
    """Answers by what the prompt says; remembers what it was sent."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrivals: list[float] = []
        self.now = self.most = 0
        self.disconnects = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._by_prompt(request, body)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects += 1
            raise
        finally:
            self.now -= 1

    async def _by_prompt(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        match prompt:
            case "status 429" | "status 503" | "status 400" | "status 500":
                return web.Response(status=int(prompt.split()[1]), text="no")
            case "hang":
                await asyncio.sleep(30)
            case "cut the connection":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        if not body["stream"]:
            await asyncio.sleep(FIRST_SECONDS)
            return web.json_response(_event("abcdef", "stop") | _usage())
        return await self._stream(request, prompt)

    async def _stream(self, request: web.Request, prompt: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(FIRST_SECONDS)
        for number in range(TOKENS):
            if number == 3 and prompt == "truncate":
                return response
            if number == 3 and prompt == "error event":
                await response.write(b'data: {"error": {"message": "engine dead"}}\n\n')
                return response
            if number == 3 and prompt == "garbage":
                await response.write(b"data: {not json\n\n")
                return response
            last = number == TOKENS - 1
            event = _event("abcdef"[number], "length" if last else None)
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if not last:
                await asyncio.sleep(GAP_SECONDS)
        await response.write(b"data: " + orjson.dumps({"choices": []} | _usage()) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(text: str, finish: str | None) -> dict[str, Any]:
    return {"id": "cmpl-7", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def _usage() -> dict[str, Any]:
    details = {"cached_tokens": 16}
    usage = {"prompt_tokens": 20, "completion_tokens": TOKENS, "prompt_tokens_details": details}
    return {"usage": usage}


@asynccontextmanager
async def serving() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    app = web.Application()
    app.router.add_post(COMPLETIONS, engine.answer)
    app.router.add_post(CHAT, engine.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def plan(*prompts: str, **values: Any) -> list[PlannedRequest]:
    return [
        PlannedRequest(request_id=f"r{n}", prompt=prompt, **values)
        for n, prompt in enumerate(prompts)
    ]


async def test_known_delays_are_what_it_reads() -> None:
    async with serving() as engine:
        before = time.time()
        seen = (await run_closed(engine.url, plan("hello", request_type="chat"), 1))[0]
        after = time.time()
    assert seen.outcome is Outcome.LENGTH
    assert (seen.status, seen.finish_reason, seen.response_id) == (200, "length", "cmpl-7")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens) == (20, 16, TOKENS)
    assert seen.token_events == TOKENS
    assert seen.started_unix_seconds is not None
    assert before <= seen.started_unix_seconds <= after
    assert seen.ttft_seconds is not None
    assert seen.tpot_seconds is not None
    assert seen.e2e_seconds is not None
    # Bounded by what the server slept, loosely above: the machine may be busy.
    assert FIRST_SECONDS <= seen.ttft_seconds <= FIRST_SECONDS + 0.5
    assert GAP_SECONDS * 0.5 <= seen.tpot_seconds <= GAP_SECONDS + 0.2
    assert seen.e2e_seconds >= seen.ttft_seconds + seen.tpot_seconds * (TOKENS - 1) - 1e-6
    assert seen.text_sha256 == hashlib.sha256(b"abcdef").hexdigest()
    assert "abcdef" not in repr(seen)


async def test_not_streamed() -> None:
    async with serving() as engine:
        seen = (await run_closed(engine.url, plan("hello", streaming=False), 1))[0]
    assert seen.outcome is Outcome.COMPLETED
    assert (seen.ttft_seconds, seen.tpot_seconds, seen.token_events) == (None, None, 0)
    assert (seen.prompt_tokens, seen.output_tokens) == (20, TOKENS)
    assert seen.e2e_seconds is not None
    assert seen.e2e_seconds >= FIRST_SECONDS
    assert seen.text_sha256 == hashlib.sha256(b"abcdef").hexdigest()


@pytest.mark.parametrize(
    ("prompt", "outcome", "status", "detail"),
    [
        ("status 429", Outcome.REJECTED, 429, "no"),
        ("status 503", Outcome.REJECTED, 503, "no"),
        ("status 400", Outcome.CLIENT_ERROR, 400, "no"),
        ("status 500", Outcome.ERROR, 500, "no"),
        ("truncate", Outcome.ERROR, 200, "truncated"),
        ("error event", Outcome.ERROR, 200, "engine dead"),
        ("garbage", Outcome.ERROR, 200, "not JSON"),
        ("cut the connection", Outcome.ERROR, None, "Disconnected"),
    ],
)
async def test_failures(prompt: str, outcome: Outcome, status: int | None, detail: str) -> None:
    async with serving() as engine:
        failed, good = await run_closed(engine.url, plan(prompt, "hello"), 1)
    assert (failed.outcome, failed.status) == (outcome, status)
    assert detail in failed.detail
    assert failed.e2e_seconds is not None
    assert good.outcome is Outcome.LENGTH


async def test_nobody_listens() -> None:
    seen = (await run_closed("http://127.0.0.1:9", plan("hello"), 1))[0]
    assert (seen.outcome, seen.status, seen.sent) == (Outcome.ERROR, None, True)


async def test_a_slow_request_is_a_timeout() -> None:
    async with serving() as engine:
        limits = Limits(request_seconds=0.2)
        seen = (await run_closed(engine.url, plan("hang"), 1, limits=limits))[0]
    assert seen.outcome is Outcome.TIMEOUT
    assert seen.status is None


async def test_the_client_can_leave_by_time_and_by_tokens() -> None:
    async with serving() as engine:
        early = (await run_closed(engine.url, plan("hello", abort_after_seconds=0.05), 1))[0]
        late = (await run_closed(engine.url, plan("hello", abort_after_token_events=2), 1))[0]
        for _ in range(100):
            if engine.disconnects == 2:
                break
            await asyncio.sleep(0.02)
        assert engine.disconnects == 2
    assert (early.outcome, early.ttft_seconds) == (Outcome.CLIENT_DISCONNECT, None)
    assert early.e2e_seconds is not None
    assert early.e2e_seconds >= 0.05
    assert (late.outcome, late.token_events) == (Outcome.CLIENT_DISCONNECT, 2)
    assert late.ttft_seconds is not None
    assert late.output_tokens is None


async def test_what_is_sent() -> None:
    async with serving() as engine:
        requests = [
            PlannedRequest(
                request_id="id-1",
                prompt="hello",
                endpoint=CHAT,
                request_type="rag",
                max_tokens=9,
                seed=3,
                model="tiny",
                headers={"x-tenant": "t"},
                extra_body={"top_k": 1},
            ),
            PlannedRequest(
                request_id="id-2",
                prompt=(1, 2, 3),
                request_type="rag",
                send_request_type=False,
                ignore_eos=False,
                streaming=False,
            ),
        ]
        await run_closed(engine.url, requests, 1)
    assert engine.bodies == [
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 9,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "seed": 3,
            "model": "tiny",
            "top_k": 1,
        },
        {"prompt": [1, 2, 3], "max_tokens": 16, "temperature": 0.0, "stream": False},
    ]
    lower = [{k.lower(): v for k, v in headers.items()} for headers in engine.headers]
    assert lower[0]["x-request-id"] == "id-1"
    assert lower[0]["x-request-type"] == "rag"
    assert lower[0]["x-tenant"] == "t"
    assert "x-request-type" not in lower[1]


async def test_closed_keeps_to_its_concurrency_and_order() -> None:
    calls: list[Observed] = []
    async with serving() as engine:
        requests = plan(*["hello"] * 8, streaming=False)
        seen = await run_closed(engine.url, requests, 3, on_observed=calls.append)
        assert engine.most == 3
    assert [s.request_id for s in seen] == [f"r{n}" for n in range(8)]
    assert {s.outcome for s in seen} == {Outcome.COMPLETED}
    assert sorted(c.request_id for c in calls) == sorted(s.request_id for s in seen)


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_connections(keep_alive: bool) -> None:
    async with serving() as engine:
        seen = await run_closed(engine.url, plan(*["x"] * 4), 2, keep_alive=keep_alive)
        closes = [h.get("Connection") == "close" for h in engine.headers]
    assert {s.outcome for s in seen} == {Outcome.LENGTH}
    assert closes == [not keep_alive] * 4


async def test_open_sends_on_time_whatever_the_server_does() -> None:
    async with serving() as engine:
        requests = [
            PlannedRequest(request_id=f"r{n}", prompt="hello", arrival_seconds=n * 0.05)
            for n in range(8)
        ]
        seen = await run_open(engine.url, requests)
        gaps = [at - engine.arrivals[0] for at in engine.arrivals]
    assert {s.outcome for s in seen} == {Outcome.LENGTH}
    assert engine.most >= 4  # one answer takes 0.32 s: they pile up, as they must
    for number, gap in enumerate(gaps):
        assert number * 0.05 - 0.04 <= gap <= number * 0.05 + 0.5


async def test_open_never_exceeds_what_may_be_in_flight() -> None:
    async with serving() as engine:
        seen = await run_open(engine.url, plan(*["hello"] * 100), limits=Limits(max_in_flight=1))
        assert engine.most == 1
    assert sum(s.sent for s in seen) == 1
    assert sum("not sent" in s.detail for s in seen) == 99


async def test_total_time_ends_all() -> None:
    async with serving() as engine:
        requests = [
            PlannedRequest(request_id="a", prompt="hang"),
            PlannedRequest(request_id="b", prompt="hello", arrival_seconds=60.0),
        ]
        begin = time.perf_counter()
        seen = await run_open(engine.url, requests, limits=Limits(total_seconds=0.3))
        assert time.perf_counter() - begin < 10
    assert [(s.outcome, s.sent) for s in seen] == [
        (Outcome.TIMEOUT, True),
        (Outcome.CANCELLED, False),
    ]


async def test_stop_ends_all() -> None:
    stop = asyncio.Event()
    async with serving() as engine:
        asyncio.get_running_loop().call_later(0.2, stop.set)
        seen = await run_closed(engine.url, plan("hang", "hello"), 1, stop=stop)
    assert [(s.outcome, s.sent) for s in seen] == [
        (Outcome.CANCELLED, True),
        (Outcome.CANCELLED, False),
    ]


async def test_a_failing_callback_is_not_swallowed() -> None:
    def fail(_: object) -> None:
        raise LookupError("callback")

    async with serving() as engine:
        with pytest.raises(LookupError):
            await run_closed(engine.url, plan("hello"), 1, on_observed=fail)


async def test_an_empty_plan() -> None:
    assert await run_closed("http://127.0.0.1:9", [], 4) == []
    assert await run_open("http://127.0.0.1:9", []) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:1/", "http://[::1]:80"])
def test_targets_on_this_host(url: str) -> None:
    assert check_target(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1:8000", "http://example.com", "http://0.0.0.0:1", "http://localhost.evil"],
)
def test_other_hosts_are_refused(url: str) -> None:
    with pytest.raises(RemoteTargetError, match="allow_remote"):
        check_target(url)
    assert check_target(url, allow_remote=True) == url


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        check_target(url)


async def test_runs_refuse_what_is_out_of_bounds() -> None:
    with pytest.raises(RemoteTargetError):
        await run_closed("http://10.0.0.1", plan("x"), 1)
    with pytest.raises(RemoteTargetError):
        await run_open("http://10.0.0.1", plan("x"))
    with pytest.raises(ValueError, match="max_requests=2"):
        await run_closed(
            "http://127.0.0.1:9", plan("x", "y", "z"), 1, limits=Limits(max_requests=2)
        )
    with pytest.raises(ValueError, match="concurrency"):
        await run_closed("http://127.0.0.1:9", plan("x"), 0)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ()}, "prompt"),
        ({"endpoint": CHAT, "prompt": (1, 2)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"arrival_seconds": -1.0}, "arrival_seconds"),
        ({"arrival_seconds": float("nan")}, "arrival_seconds"),
        ({"arrival_seconds": float("inf")}, "arrival_seconds"),
    ],
)
def test_a_request_that_cannot_be_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PlannedRequest(**({"request_id": "r", "prompt": "x"} | values))

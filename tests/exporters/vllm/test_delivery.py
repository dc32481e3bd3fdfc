"""TTFT to the first chunk's send, and that every request is one record whatever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.vllm import fakes
from exporters.vllm.web import Web, body, nothing, post, read
from servoscope.exporters.vllm.delivery import Delivery, first_token_at
from servoscope.exporters.vllm.hooks import MAX_FAULTS
from servoscope.exporters.vllm.http_exchange import MAX_HELD, HttpExchange
from servoscope.exporters.vllm.open_requests import Call

START = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
STOP, LENGTH = fakes.FinishReason.STOP, fakes.FinishReason.LENGTH

Steps = Callable[[Web, Any], Awaitable[None]]


class Stream(Web):
    """A POST whose handler is ``steps(web, send)``; the body is in at 101.0."""

    async def serve(self, steps: Steps) -> list[Any]:
        """Serve one; returns what reached the server."""
        sent: list[Any] = []

        async def handler(_scope: Any, receive: Any, send: Any) -> None:
            await read(receive)
            await steps(self, send)

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(handler)(post(), self.server(body()), send)
        return sent

    def output(self, ident: str, finish: fakes.FinishReason | None = None) -> Any:
        """One token now; returns the batch's IterationStats."""
        stats = self.stats_class(self.clock.now)
        first = self.processor.request_states[ident].is_prefilling
        events = (9.0, 9.5) if first else None
        at = self.clock.now - 90.0
        self.processor.process(ident, 1, at, stats, events=events, finish=finish)
        return stats

    @property
    def told(self) -> list[tuple[str, float | None, str]]:
        """Records so far: id, TTFT, whose clock."""
        return [
            (m["request_id"], m["time_to_first_token_seconds"], m["ttft_by"]) for m in self.messages
        ]


async def test_ttft_ends_at_the_first_chunk_after_the_first_output() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        await send(START)
        await send(CHUNK)  # "created": no token yet
        web.clock.now = 104.0
        web.output("i")
        web.clock.now = 106.0
        await send(CHUNK)
        web.clock.now = 107.0
        await send(CHUNK)
        web.output("i", STOP)
        assert len(web.messages) == 1  # nothing to wait for
        await send(END)

    sent = await web.serve(steps)
    assert sent == [START, CHUNK, CHUNK, CHUNK, END]
    (message,) = web.messages
    assert message["first_token_unix_seconds"] == 106.0
    assert message["time_to_first_token_seconds"] == 5.0
    assert message["e2e_seconds"] == 6.0
    assert message["decode_seconds"] == message["time_per_output_token_seconds"] == 3.0
    assert (web.life.ttft_by, web.life.delivery.http_firsts) == ("http", 1)
    assert web.life.delivery.engine_firsts == 0


async def test_an_answer_that_ended_in_the_engine_before_its_first_chunk_waits_for_it() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.clock.now = 103.0
        web.output("i", LENGTH)
        assert web.messages == []
        assert web.life.snapshot() == ([], 0)  # it is not in flight any more, and not told yet
        web.clock.now = 104.0
        await send(START)
        assert web.messages == []
        await send(CHUNK)
        assert web.told == [("chatcmpl-i", 3.0, "http")]
        await send(END)

    await web.serve(steps)
    (message,) = web.messages
    assert message["e2e_seconds"] == 3.0  # no client has an answer before its first token
    assert message["finished_unix_seconds"] == 104.0


@pytest.mark.parametrize(
    ("kind", "by"), [(fakes.OutputKind.FINAL_ONLY, "engine"), (fakes.OutputKind.DELTA, "http")]
)
async def test_only_streamed_answers_have_a_first_chunk(kind: fakes.OutputKind, by: str) -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.processor.add_request(
            fakes.EngineCoreRequest("i", "cmpl-i-0", web.clock.now, output_kind=kind)
        )
        web.output("i", STOP)
        assert len(web.messages) == (by == "engine")
        web.clock.now += 1.0
        await send(START)
        await send(END)

    await web.serve(steps)
    assert web.told == [("cmpl-i", 1.0 if by == "http" else 0.0, by)]
    assert web.life.ttft_by == "http"  # as far as streamed answers were seen


@pytest.mark.parametrize("error", [None, ValueError("theirs"), asyncio.CancelledError()])
async def test_nothing_sent_is_the_engines_time_at_the_end_of_the_call(
    error: BaseException | None,
) -> None:
    web = Stream()

    async def steps(web: Any, _send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.clock.now += 2.0
        web.output("i", STOP)
        assert web.messages == []
        if error is not None:
            raise error

    with contextlib.suppress(ValueError, asyncio.CancelledError):
        await web.serve(steps)
    assert web.told == [("chatcmpl-i", 2.0, "engine")]
    assert web.life.ttft_by == "engine"


async def test_an_abort_after_a_token_that_was_never_sent() -> None:
    web = Stream()

    async def steps(web: Any, _send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.output("i")
        web.processor.abort_requests(["i"], internal=True)
        web.register("j", "chatcmpl-j")  # before its first token: nothing to wait for
        web.processor.abort_requests(["j"], internal=True)
        assert web.told == [("chatcmpl-j", None, "engine")]

    await web.serve(steps)
    assert web.told[1:] == [("chatcmpl-i", 0.0, "engine")]


async def test_what_ends_after_the_call_is_told_at_once() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.register("j", "chatcmpl-j")
        web.output("i")
        web.clock.now += 1.0
        await send(CHUNK)

    await web.serve(steps)
    web.clock.now += 1.0
    web.output("i", STOP)
    web.output("j", STOP)  # its first token came after the chunk: not its chunk
    assert web.told == [("chatcmpl-i", 1.0, "http"), ("chatcmpl-j", 2.0, "engine")]


async def test_samples_and_prompts_end_ttft_at_the_posts_first_chunk() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        parent = fakes.ParentRequest("p", "chatcmpl-n")
        for sample in range(2):
            request = fakes.EngineCoreRequest(f"{sample}_p", "chatcmpl-n", web.clock.now)
            web.processor.add_request(request, None, parent)
        web.clock.now = 103.0
        web.output("1_p", STOP)
        web.clock.now = 104.0
        await send(CHUNK)
        web.output("0_p", STOP)
        assert web.told == [("chatcmpl-n", 3.0, "http")]

    await web.serve(steps)

    async def listed(web: Any, send: Any) -> None:
        began = web.clock.now
        for number in range(3):
            web.register(f"i{number}", f"cmpl-list-{number}")
        for number in (2, 0, 1):
            web.clock.now += 1.0
            web.output(f"i{number}", STOP)
        assert len(web.messages) == 1
        web.clock.now = began + 5.0
        await send(CHUNK)

    await web.serve(listed)
    assert web.told[1:] == [("cmpl-list", 5.0, "http")]


async def test_a_record_may_wait_for_its_rank_and_for_its_chunk_in_either_order() -> None:
    web = Stream(ranks=2)

    async def steps(web: Any, send: Any) -> None:
        for name in ("sent-first", "rank-first"):
            web.register(name, f"chatcmpl-{name}")
        early = web.output("sent-first", STOP)
        late = web.output("rank-first", STOP)
        web.life.stepped(1, None, late)
        assert web.messages == []
        web.clock.now += 1.0
        await send(CHUNK)
        assert [m["rank"] for m in web.messages] == [1]
        web.life.stepped(0, None, early)
        web.life.stepped(0, None, early)  # once
        assert [m["rank"] for m in web.messages] == [1, 0]

    await web.serve(steps)
    assert [m["ttft_by"] for m in web.messages] == ["http", "http"]


async def test_a_rank_that_comes_after_the_call() -> None:
    web = Stream(ranks=2)
    batches: list[Any] = []

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        batches.append(web.output("i", STOP))
        web.clock.now += 1.0
        await send(CHUNK)

    await web.serve(steps)
    assert web.messages == []
    web.life.stepped(1, None, batches[0])
    assert [(m["rank"], m["ttft_by"]) for m in web.messages] == [(1, "http")]


async def test_a_clock_set_back_is_not_believed() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.clock.now = 110.0
        web.output("i")
        web.clock.now = 50.0
        await send(CHUNK)
        web.clock.now = 111.0
        web.output("i", STOP)

    await web.serve(steps)
    assert web.told == [("chatcmpl-i", 9.0, "engine")]


@pytest.mark.parametrize("how", ["off", "bypass"])
async def test_hooks_that_go_away_meanwhile_lose_nothing_that_has_ended(how: str) -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        web.register("i", "chatcmpl-i")
        web.clock.now += 1.0
        web.output("i", STOP)
        if how == "bypass":
            web.hooks.bypass = True
        else:
            for _ in range(MAX_FAULTS):
                web.hooks.fault(ValueError("ours"))
        web.clock.now += 1.0
        await send(CHUNK)
        assert web.told == [("chatcmpl-i", 1.0, "engine")]
        await send(CHUNK)

    await web.serve(steps)
    assert len(web.messages) == 1


async def test_our_faults_at_a_send_stay_here() -> None:
    web = Stream()

    async def steps(web: Any, send: Any) -> None:
        for name in ("i", "j"):
            web.register(name, f"chatcmpl-{name}")
            web.output(name, STOP)
        await send({})  # no type
        await send(None)
        web.life.delivery._emit = refusing
        await send(CHUNK)
        web.life.delivery._emit = web.messages.append

    def refusing(_message: Any) -> None:
        raise OverflowError

    sent = await web.serve(steps)
    assert sent == [{}, None, CHUNK]
    assert web.hooks.faults == 3
    assert [m["request_id"] for m in web.messages] == ["chatcmpl-j"]  # the other is the fault


async def test_an_error_of_the_servers_send_gets_in_as_it_is() -> None:
    web = Web()

    async def send(_message: Any) -> None:
        raise OSError("closed")

    async def handler(_scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        with pytest.raises(OSError, match="closed"):
            await send(CHUNK)

    await web.app(handler)(post(), web.server(body()), send)
    assert web.hooks.faults == 0


async def test_send_gives_back_the_servers_own_awaitable() -> None:
    web = Web()
    made: list[Any] = []

    def send(_message: Any) -> Any:
        made.append(nothing(None))
        return made[-1]

    async def handler(_scope: Any, _receive: Any, send: Any) -> None:
        waited = send(CHUNK)
        assert waited is made[-1]
        await waited

    await web.app(handler)(post(), web.server(), send)


def test_held_records_are_bounded() -> None:
    exchange = HttpExchange()
    given_back: list[int] = []
    assert not exchange.hold(lambda: given_back.append(-1))  # nothing streamed is open
    exchange.watch(SimpleNamespace(is_prefilling=False))
    held = [exchange.hold(lambda n=n: given_back.append(n)) for n in range(MAX_HELD + 5)]  # type: ignore[misc]
    assert held == [True] * MAX_HELD + [False] * 5
    exchange.close()
    exchange.close()
    assert given_back == list(range(MAX_HELD))
    exchange.watch(SimpleNamespace(is_prefilling=False))
    assert not exchange.hold(lambda: given_back.append(-1))


def test_a_record_that_is_held_while_another_thread_settles_is_given_back() -> None:
    exchange = HttpExchange()
    given_back: list[str] = []

    class Settling(list[Any]):
        """Just after the look at ``unsent`` the other thread empties it."""

        def __bool__(self) -> bool:
            exchange.unsent = []
            return True

    exchange.unsent = Settling()
    assert exchange.hold(lambda: given_back.append("x"))
    assert given_back == ["x"]


@given(
    st.floats(0, 2e9),
    st.floats(0, 1e5) | st.none(),
    st.floats(0, 1e5),
    st.floats(-1e5, 1e5) | st.none(),
)
def test_a_moved_first_token_keeps_the_order_of_the_moments(
    received: float, ttft: float | None, rest: float, later: float | None
) -> None:
    first = None if ttft is None else received + ttft
    message: dict[str, Any] = {
        "ttft_by": "engine",
        "received_unix_seconds": received,
        "first_token_unix_seconds": first,
        "time_to_first_token_seconds": ttft,
        "finished_unix_seconds": (first or received) + rest,
        "e2e_seconds": (ttft or 0.0) + rest,
    }
    before = dict(message)
    at = None if later is None else (first or received) + later
    if not first_token_at(message, at):
        assert message == before
        return
    assert at is not None
    assert first is not None
    assert message["ttft_by"] == "http"
    assert received <= first <= at == message["first_token_unix_seconds"]
    assert at <= message["finished_unix_seconds"]
    assert message["time_to_first_token_seconds"] <= message["e2e_seconds"]


KINDS = ("one", "one", "samples", "list", "whole", "beam")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), ranks=st.sampled_from((1, 2)))
def test_every_request_is_one_record_whatever_comes_first(data: st.DataObject, ranks: int) -> None:
    """Any order of outputs, ends, aborts, sends, steps, loss of the hooks and end of the call."""
    web = Stream(ranks=ranks)
    wanted: list[str] = []
    unfinished: list[str] = []
    batches: list[Any] = []
    numbers = itertools.count()

    def begin(kind: str) -> None:
        number = len(wanted)
        external = f"chatcmpl-{number}"
        wanted.append(external)
        more: dict[str, Any] = {}
        parent = None
        idents = [f"{number}"]
        externals = [external]
        if kind == "samples":
            parent = fakes.ParentRequest(f"p{number}", external)
            idents = [f"{n}_p{number}" for n in range(3)]
            externals = [external] * 3
        elif kind == "list":
            wanted[-1] = f"cmpl-{number}"
            idents = [f"l{number}-{n}" for n in range(3)]
            externals = [f"cmpl-{number}-{n}" for n in range(3)]
        elif kind == "whole":
            more["output_kind"] = fakes.OutputKind.FINAL_ONLY
        elif kind == "beam":
            wanted.pop()
            externals = [f"cmpl-{number}-{'a' * 32}-beam-0"]
            idents = [f"b{next(numbers)}"]
        for ident, name in zip(idents, externals, strict=True):
            request = fakes.EngineCoreRequest(ident, name, web.clock.now, **more)
            web.processor.add_request(request, None, parent)
        unfinished.extend(idents)

    def step(action: str) -> None:
        web.clock.now += data.draw(st.sampled_from((0.0, 0.5, -0.1)))
        if action == "rank" and batches:
            web.life.stepped(1, None, batches.pop(0))
        if not unfinished or action not in ("output", "finish", "abort"):
            return
        ident = data.draw(st.sampled_from(unfinished))
        if action == "abort":
            web.processor.abort_requests([ident], internal=True)
            unfinished.remove(ident)
        else:
            batches.append(web.output(ident, STOP if action == "finish" else None))
            if action == "finish":
                unfinished.remove(ident)

    async def steps(_web: Any, send: Any) -> None:
        for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)):
            begin(kind)
        actions = st.sampled_from(("output", "finish", "finish", "abort", "send", "send", "rank"))
        for action in data.draw(st.lists(actions, max_size=14)):
            if action == "send":
                await send(data.draw(st.sampled_from((START, CHUNK, END))))
            else:
                step(action)
        if data.draw(st.booleans()):
            raise data.draw(st.sampled_from((ValueError(), asyncio.CancelledError())))

    async def main() -> None:
        with contextlib.suppress(ValueError, asyncio.CancelledError):
            await web.serve(steps)

    asyncio.run(main())
    while unfinished:
        step(data.draw(st.sampled_from(("finish", "abort", "output"))))
    while batches:
        step("rank")
    assert Counter(m["request_id"] for m in web.messages) == Counter(wanted)
    assert web.hooks.faults == 0
    assert len(web.life) == 0
    counted = Counter(m["ttft_by"] for m in web.messages)
    delivery: Delivery = web.life.delivery
    assert counted["http"] == delivery.http_firsts
    for message in web.messages:
        ttft = message["time_to_first_token_seconds"]
        assert message["ttft_by"] == "engine" or (ttft is not None and message["streaming"])


def test_a_request_without_a_post_is_told_at_once() -> None:
    told: list[Any] = []
    delivery = Delivery(told.append)
    delivery.ended({"streaming": True, "first_token_unix_seconds": 1.0}, Call("x"))
    assert len(told) == 1
    assert delivery.engine_firsts == 0

"""The wrapped ASGI application, with stand-ins for FastAPI, its server and the engine."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from contextvars import copy_context
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.vllm import fakes
from exporters.vllm.web import DISCONNECT, Web, body, nothing, post, read
from servoscope.exporters.plugin.hello import Hello
from servoscope.exporters.vllm.hooks import MAX_FAULTS, Hooks
from servoscope.exporters.vllm.http_exchange import (
    MAX_TEXT,
    HttpExchange,
    current_exchange,
    watch_http,
)
from servoscope.exporters.vllm.lifecycle import MAX_BEFORE_ARRIVAL_SECONDS, Lifecycle
from servoscope.exporters.vllm.requests import record_from_message

CANARY = "canary-prompt-text"
HELLO = Hello(protocol=1, version="0", engine="vllm", engine_version="0", boot_id="b", pid=1)


async def test_a_request_starts_at_the_last_message_of_its_body() -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)  # three messages: the last one at 103.0
        web.clock.now += 4.0  # JSON, pydantic, the template
        web.register("i1", "cmpl-a-0")
        web.finish("i1")

    headers = ((b"x-request-type", b"rag"), (b"X-TENANT", b"no: ASGI names are lower case"))
    scope = post(*headers, (b"x-tenant", b"acme"), (b"authorization", b"Bearer secret"))
    parts = (body(b"a", more=True), body(CANARY.encode(), more=True), body())
    await web.app(handler)(scope, web.server(*parts), nothing)
    (message,) = web.messages
    assert message["received_unix_seconds"] == 103.0
    assert message["time_to_first_token_seconds"] == 6.0  # 4 s before the engine's arrival, 2 after
    assert message["e2e_seconds"] == 7.0
    assert (message["queue_seconds"], message["prefill_seconds"]) == (0.5, 2.5)  # the engine's
    assert message["received_by"] == web.life.received_by == "http"
    record = record_from_message(
        json.loads(json.dumps({**message, "inter_token_seconds": []})), HELLO
    )
    assert (record.request_type_hint, record.tenant) == ("rag", "acme")
    assert record.endpoint == "/v1/completions"
    assert "secret" not in repr(web.messages)
    assert web.hooks.faults == 0
    assert current_exchange() is None


async def test_child_tasks_see_it_and_prompts_of_a_list_have_one_start() -> None:
    web = Web()

    async def one(number: int) -> None:
        await asyncio.sleep(0)
        web.clock.now += 1.0
        web.register(f"i{number}", f"cmpl-list-{number}")

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await asyncio.create_task(read(receive))  # as a middleware does: the body in another task
        await asyncio.gather(*(asyncio.create_task(one(number)) for number in range(3)))
        for number in range(3):
            web.finish(f"i{number}")

    await web.app(handler)(post(), web.server(body()), nothing)
    (message,) = web.messages
    assert (message["received_unix_seconds"], message["prompts"]) == (101.0, 3)
    assert (web.life.http_starts, web.life.engine_starts) == (1, 0)


async def test_a_later_turn_of_the_same_post_was_not_received_again() -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        for turn in range(2):
            web.clock.now += 10.0
            web.register(f"i{turn}", f"resp_x_{turn}")
            web.finish(f"i{turn}")
            await send({"type": "http.response.body"})

    await web.app(handler)(post((b"x-request-type", b"agent")), web.server(body()), nothing)
    assert [m["received_unix_seconds"] for m in web.messages] == [101.0, 121.0]
    assert [m["received_by"] for m in web.messages] == ["http", "engine"]
    assert [m["request_type_hint"] for m in web.messages] == ["agent", "agent"]
    assert web.life.odd_starts == 0


async def test_two_posts_at_once_do_not_mix() -> None:
    web = Web()

    async def handler(scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        await asyncio.sleep(0)
        name = scope["headers"][0][1].decode()
        web.register(name, f"chatcmpl-{name}")
        await asyncio.sleep(0)
        web.finish(name)

    app = web.app(handler)
    await asyncio.gather(
        *(
            asyncio.create_task(
                app(post((b"x-tenant", f"t{n}".encode())), web.server(body()), nothing)
            )
            for n in range(20)
        )
    )
    assert [m["tenant"] for m in web.messages] == [m["request_id"][9:] for m in web.messages]
    assert len({m["received_unix_seconds"] for m in web.messages}) == 20


async def test_a_client_that_leaves_before_its_body_ended() -> None:
    web = Web()
    seen: list[HttpExchange | None] = []

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        assert await receive() == DISCONNECT
        seen.append(current_exchange())
        web.register("i", "chatcmpl-i", 200.0)
        web.finish("i")

    messages = (body(b"a", more=True), {"type": "http.disconnect"}, DISCONNECT)
    await web.app(handler)(post(), web.server(*messages), nothing)
    assert seen[0] is not None
    assert seen[0].received is None
    assert web.messages[0]["received_unix_seconds"] == 200.0
    assert web.life.received_by == "engine"  # as far as it was seen


async def test_what_comes_after_the_body_changes_nothing() -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        await receive()  # listens for a disconnect, and some servers send an empty body again
        await receive()
        start = current_exchange()
        assert start is not None
        assert start.received == 101.0

    await web.app(handler)(post(), web.server(body(), body(), DISCONNECT), nothing)


@pytest.mark.parametrize("error", [ValueError("the application's"), asyncio.CancelledError()])
async def test_an_error_of_the_application_gets_out_as_it_is(error: BaseException) -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        raise error

    with pytest.raises(type(error)) as caught:
        await web.app(handler)(post(), web.server(body()), nothing)
    assert caught.value is error
    assert current_exchange() is None
    assert web.hooks.faults == 0


async def test_an_error_of_the_server_gets_in_as_it_is() -> None:
    web = Web()

    async def receive() -> Any:
        raise OSError("reset")

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        with pytest.raises(OSError, match="reset"):
            await receive()

    await web.app(handler)(post(), receive, nothing)
    assert web.hooks.faults == 0


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/realtime", "headers": []},
        {"type": "http", "method": "GET", "path": "/health", "headers": []},
    ],
)
async def test_other_scopes_pass_untouched(scope: dict[str, Any]) -> None:
    web = Web()
    before = dict(scope)

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        web.register("i", "chatcmpl-i")

    receive = web.server(body())
    await web.app(handler)(scope, receive, nothing)
    assert web.got == [(before, receive, nothing)]
    assert web.got[0][0] is scope
    assert (web.life.http_starts, web.life.engine_starts) == (0, 1)


async def test_a_start_that_leaked_with_the_connection_is_not_used() -> None:
    """asyncio runs a connection's later callbacks in the context of its first request."""
    web = Web()
    leaked: list[Any] = []

    async def first(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        leaked.append(copy_context())

    async def second(_scope: Any, _receive: Any, _send: Any) -> None:
        assert current_exchange() is None

    await web.app(first)(post(), web.server(body()), nothing)
    assert leaked[0].run(current_exchange) is not None
    scope = {"type": "websocket", "path": "/", "headers": []}
    loop = asyncio.get_running_loop()
    await loop.create_task(web.app(second)(scope, None, nothing), context=leaked[0])


async def test_a_post_passes_scope_and_messages_untouched_and_sends_nothing() -> None:
    web = Web()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def handler(_scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message is only  # the server's own object: nothing is copied
        await send(answer)

    answer = {"type": "http.response.start"}
    only = body(CANARY.encode())
    scope = post()
    await web.app(handler)(scope, web.server(only), send)
    assert web.got[0][0] is scope
    assert scope == post()
    assert sent == [answer]
    assert sent[0] is answer


async def test_a_start_that_makes_no_sense_is_not_believed() -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        for number, arrival in enumerate((100.5, 102.0 + MAX_BEFORE_ARRIVAL_SECONDS)):
            web.register(f"i{number}", f"chatcmpl-{number}", arrival)
            web.processor.abort_requests([f"i{number}"], internal=True)

    for _ in range(2):
        await web.app(handler)(post(), web.server(body()), nothing)
        web.clock.now = 100.0
    assert [m["received_by"] for m in web.messages] == ["engine"] * 4
    assert web.messages[0]["received_unix_seconds"] == 100.5
    assert web.life.odd_starts == 2  # the second of each POST is a later turn


async def test_a_refusal_knows_its_client() -> None:
    web = Web()
    web.llm_class.limit = 0  # type: ignore[attr-defined]

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        web.clock.now += 0.5
        with pytest.raises(fakes.QueueOverflowError):
            web.llm_class().check_admission(1, request_id="cmpl-foo-0-12345678")

    scope = post((b"x-request-type", b"chat"), path="/v1/messages")
    await web.app(handler)(scope, web.server(body()), nothing)
    (message,) = web.messages
    assert (message["request_type_hint"], message["endpoint"]) == ("chat", "/v1/messages")
    assert (message["outcome"], message["e2e_seconds"]) == ("rejected", 0.5)


@given(st.binary(max_size=600), st.text(max_size=600), st.text(max_size=5))
def test_hostile_headers_and_paths_are_bounded_and_printable(
    value: bytes, path: str, root: str
) -> None:
    web = Web()
    seen: list[HttpExchange | None] = []

    async def handler(_scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(current_exchange())

    scope = post((b"x-tenant", value), (b"x-tenant", b"second"), path=root + path, root_path=root)
    asyncio.run(web.app(handler)(scope, web.server(), nothing))
    assert web.hooks.faults == 0
    assert seen[0] is not None
    for text in (seen[0].tenant, seen[0].endpoint, seen[0].hint):
        assert text is None or (0 < len(text) <= MAX_TEXT and text.isprintable())
    assert (
        not root
        or not path.startswith("/")
        or seen[0].endpoint == path[:MAX_TEXT].strip()
        or (not path[:MAX_TEXT].strip().isprintable())
    )


async def test_prompt_text_is_never_kept() -> None:
    web = Web()

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        await read(receive)
        web.register("i", "chatcmpl-i")

    await web.app(handler)(post(), web.server(body(CANARY.encode())), nothing)
    web.got.clear()
    kept = [o for o in gc.get_objects() if isinstance(o, HttpExchange)]
    assert kept
    for start in kept:
        assert CANARY not in repr([getattr(start, name) for name in HttpExchange.__slots__])
    assert CANARY not in repr(web.life.snapshot())


class Garbage:
    """Every look at it raises."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


async def test_a_fault_of_ours_is_counted_harmless_and_ends_in_unhooking() -> None:
    web = Web()
    plain = web.application.__dict__["__call__"].__wrapped__
    served: list[Any] = []

    async def handler(_scope: Any, receive: Any, _send: Any) -> None:
        served.append(await receive())

    app = web.app(handler)
    broken = post()
    broken["headers"] = 7
    await app(Garbage(), web.server(body()), nothing)
    await app(broken, web.server(body()), nothing)
    await app(post(), web.server(Garbage()), nothing)  # type: ignore[arg-type]
    assert (web.hooks.faults, len(served)) == (3, 3)
    held = app.__call__  # a server that looked it up before we went away
    for _ in range(MAX_FAULTS):
        await app(broken, web.server(body()), nothing)
    assert web.hooks.off
    assert web.hooks.faults == MAX_FAULTS
    assert web.application.__dict__["__call__"] is plain
    web.got.clear()
    receive = web.server(body())
    await held(post(), receive, nothing)
    assert web.got[0][1] is receive


async def test_bypass_passes_through() -> None:
    web = Web()
    web.hooks.bypass = True

    async def handler(_scope: Any, _receive: Any, _send: Any) -> None:
        assert current_exchange() is None

    receive = web.server(body())
    await web.app(handler)(post(), receive, nothing)
    assert web.got[0][1] is receive


def test_wrapping_again_changes_nothing() -> None:
    web = Web()
    wrapped = web.application.__dict__["__call__"]
    assert watch_http(web.hooks, web.modules)
    assert watch_http(Hooks(), web.modules)
    assert web.application.__dict__["__call__"] is wrapped
    assert inspect.iscoroutinefunction(web.application().__call__)  # servers tell ASGI 3 by it
    web.hooks.unwrap()
    assert not hasattr(web.application.__dict__["__call__"], "servoscope")


def test_starlette_where_fastapi_has_no_call_of_its_own() -> None:
    web = Web(module="starlette.applications", name="Starlette")
    fastapi = ModuleType("fastapi")
    fastapi.FastAPI = type("FastAPI", (web.application,), {})  # type: ignore[attr-defined]
    web.hooks.unwrap()
    assert watch_http(web.hooks, {"fastapi": fastapi, **web.modules})
    assert hasattr(web.application.__dict__["__call__"], "servoscope")
    assert "__call__" not in fastapi.FastAPI.__dict__


@pytest.mark.parametrize("content", [{}, {"FastAPI": "no class"}, {"FastAPI": object()}])
def test_where_there_is_nothing_to_wrap_it_is_the_engines_clock(content: dict[str, Any]) -> None:
    module = ModuleType("fastapi")
    module.__dict__.update(content)
    hooks = Hooks()
    assert not watch_http(hooks, {"fastapi": module})
    assert not watch_http(hooks, {})
    assert not hooks.installed
    assert Lifecycle(lambda _: None).received_by == "engine"

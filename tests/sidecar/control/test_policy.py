"""The collector's policy: read with care, only restricts, stands without a collector."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engines.background import background
from servoscope.alerts.digest import digest
from servoscope.alerts.spec import default_spec
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.exporters.records import SourceState
from servoscope.sidecar.control.policy import MODES, Policy, PolicyError, parse_policy
from servoscope.sidecar.control.policy_poll import AskError, PolicyPoll, ask_collector

GOOD = {"control_mode": "observe", "slo_digest": "0123456789abcdef", "drift_freeze": False}
POLICY = Policy("observe", "0123456789abcdef", False)


def body(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_policy_is_read_and_what_is_new_in_it_is_left_alone() -> None:
    assert parse_policy(body()) == POLICY
    assert parse_policy(body(later="x", more={"a": 1})) == POLICY
    for mode in MODES:
        assert parse_policy(body(control_mode=mode)).control_mode == mode
    assert parse_policy(body(control_mode="of_later")).control_mode == "observe"  # least is allowed


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "body"), (b"{", "body"), (b"[1]", "body"), (b"null", "body"), (b"\xff\xfe", "body"),
        (b"[" * 5_000, "body"), (b"{}", "control_mode"),
        (body(control_mode="ON"), "control_mode"), (body(control_mode="x" * 33), "control_mode"),
        (body(control_mode=["on"]), "control_mode"), (body(control_mode=None), "control_mode"),
        (body(slo_digest=""), "slo_digest"), (body(slo_digest="x" * 129), "slo_digest"),
        (body(slo_digest="a b"), "slo_digest"), (body(slo_digest='"\n'), "slo_digest"),
        (body(slo_digest=5), "slo_digest"), (body(drift_freeze="no"), "drift_freeze"),
        (body(drift_freeze=0), "drift_freeze"),
    ],
)  # fmt: skip
def test_what_is_no_policy_names_the_field(raw: bytes, field: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw)
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([*GOOD, "x"]), inner, max_size=4),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_answer_is_a_policy_or_an_error(raw: bytes) -> None:
    try:
        found = parse_policy(raw)
    except PolicyError:
        return
    assert found.control_mode in MODES


def test_only_modes_in_which_the_loop_may_act_let_knobs_be_set() -> None:
    allowed = {mode for mode in MODES if not Policy(mode, "a", False).refuses_knobs}
    assert allowed == {"canary", "on"}
    assert "'observe'" in POLICY.refuses_knobs
    assert "drift" in Policy("on", "a", True).refuses_knobs


class Asked:
    """A collector that answers from a script."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.count = 0

    async def __call__(self) -> bytes:
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def poll(ask: Asked | None, *, obeyed: bool = True, **more: Any) -> PolicyPoll:
    settings: dict[str, Any] = {"interval_seconds": 20.0, "clock": lambda: 1_000.0, **more}
    return PolicyPoll(ask, "0123456789abcdef", obeyed=obeyed, **settings)


async def test_the_last_policy_stands_when_the_collector_is_away_or_answers_nonsense() -> None:
    ask = Asked(body(), AskError("connection", "refused"), b"<html>", body(control_mode="on"))
    subject = poll(ask)
    assert subject.view.state is SourceState.IDLE
    assert subject.refuses_knobs == ""
    await subject.once(ask)
    assert (subject.view.state, subject.view.policy) == (SourceState.OK, POLICY)
    assert subject.view.last_success_unix_seconds == 1_000.0
    for state, reason in ((SourceState.FAILED, "connection"), (SourceState.BAD_VALUE, "bad_value")):
        await subject.once(ask)
        assert (subject.view.state, subject.view.policy) == (state, POLICY)
        assert "the last policy stands" in subject.view.detail
        assert "'observe'" in subject.refuses_knobs
        assert subject.errors[reason] == 1
    await subject.once(ask)
    assert subject.refuses_knobs == ""
    json.dumps(subject.view.as_json())


async def test_a_policy_that_is_not_obeyed_refuses_nothing_and_is_told() -> None:
    ask = Asked(body())
    subject = poll(ask, obeyed=False)
    await subject.once(ask)
    assert subject.refuses_knobs == ""
    assert subject.view.as_json()["control_mode"] == "observe"


async def test_other_objectives_than_the_collectors_are_told() -> None:
    ask = Asked(body(slo_digest="other"), AskError("timeout", "5 s"))
    subject = poll(ask)
    assert subject.view.slo_mismatch is None  # nobody knows
    await subject.once(ask)
    assert subject.view.slo_mismatch is True
    assert "give both the same slos" in subject.view.detail
    await subject.once(ask)
    assert "does not tell" in subject.view.detail
    assert "give both the same slos" in subject.view.detail


async def test_it_asks_again_and_again_and_not_all_at_once() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    chances = iter([0.0, 0.5, 1.0] * 100_000)
    ask = Asked(body(), AskError("connection", "x"), body())
    subject = poll(ask, sleep=sleep, chance=lambda: next(chances))
    async with background(subject.run()), asyncio.timeout(10):
        while ask.count < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert pauses[:3] == [15.0, 20.0, 25.0]


async def test_without_a_collector_nobody_is_asked() -> None:
    subject = poll(None)
    async with background(subject.run()) as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert subject.view.state is SourceState.OFF
    assert subject.view.policy is None


Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/api/v1/policy", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def test_the_question_carries_the_token() -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(body=body())

    async with served(answer) as url, aiohttp.ClientSession() as session:
        assert await ask_collector(session, url, "word")() == body()
        assert await ask_collector(session, url)() == body()
    assert seen == ["Bearer word", None]


@pytest.mark.parametrize(
    ("status", "size", "reason"),
    [(401, 1, "http_401"), (404, 1, "http_404"), (302, 1, "http_302"), (503, 1, "http_503"),
     (200, 70_000, "too_large")],
)  # fmt: skip
async def test_answers_that_are_no_policy(status: int, size: int, reason: str) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=b"x" * size, headers={"Location": "/"})

    async with served(answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(AskError) as caught:
            await ask_collector(session, url)()
    assert caught.value.reason == reason


async def test_nobody_there_and_one_who_hangs(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servoscope.sidecar.control.policy_poll._ANSWER_SECONDS", 0.2)

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with served(hang) as url, aiohttp.ClientSession() as session:
        for place, reason in (
            (url, "timeout"),
            (f"http://127.0.0.1:{unused_tcp_port}", "connection"),
        ):
            with pytest.raises(AskError) as caught:
                await ask_collector(session, place)()
            assert caught.value.reason == reason
        assert "(Connection refused); start it: servoscope collector" in str(caught.value)


async def test_a_real_collector_is_understood(tmp_path: Path) -> None:
    objectives = default_spec().objectives
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = CollectorConfig(port=0, database=tmp_path / "c.duckdb", threads=1)
    async with (
        background(run_collector(config, objectives, on_ready=url.set_result)),
        aiohttp.ClientSession() as session,
    ):
        ask = ask_collector(session, await asyncio.wait_for(url, 20))
        for ours, differs in ((objectives, False), (objectives[:1], True)):
            subject = PolicyPoll(
                ask, digest(ours), obeyed=True, interval_seconds=20.0, clock=lambda: 1.0
            )
            await subject.once(ask)
            assert subject.view.state is SourceState.OK
            assert subject.view.slo_mismatch is differs
            assert subject.refuses_knobs

"""Replay: what becomes of a trace, and that it runs until it is told to stop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.lab.client import RemoteTargetError
from servoscope.lab.replay import Progress, Quadrants, Scale, plan_pass, replay
from servoscope.lab.request import CHAT
from servoscope.lab.trace import TraceRequest

EXACT = Scale(arrival=2.0, spread_seconds=0.0, prompt=1 / 32, output=1 / 8)
NOBODY = "http://127.0.0.1:9"


def test_lengths_arrivals_and_types() -> None:
    trace = [
        TraceRequest(0.0, 3200, 80),
        TraceRequest(1.0, 320, 8000),
        TraceRequest(2.0, 3_200_000, 8),
        TraceRequest(3.0, 8000, 800),
    ]
    plan = plan_pass(trace, EXACT, abort_share=0.0)
    assert [p.arrival_seconds for p in plan] == [0.0, 2.0, 4.0, 6.0]
    assert [len(p.prompt) for p in plan] == [100, 10, 1600, 250]
    assert [p.max_tokens for p in plan] == [10, 160, 1, 100]
    assert [p.request_type for p in plan] == ["chat", "generate", "summarise", "rag"]
    assert {p.endpoint for p in plan} == {CHAT}
    own = Quadrants(prompt_tokens=1000, output_tokens=10)
    kinds = [p.request_type for p in plan_pass(trace, EXACT, quadrants=own)]
    assert kinds == ["rag", "generate", "summarise", "rag"]


def test_shared_blocks_are_shared_exactly() -> None:
    trace = [
        TraceRequest(0.0, 2048, 8, (1, 2)),
        TraceRequest(1.0, 2048, 8, (1, 2, 3)),
        TraceRequest(2.0, 2048, 8, (1, 9)),
        TraceRequest(3.0, 2048, 8, ()),
    ]
    a, b, c, d = (str(p.prompt) for p in plan_pass(trace, EXACT))
    assert [len(x) for x in (a, b, c, d)] == [64] * 4
    assert a[:32] == b[:32]
    assert a[:16] == c[:16]
    assert len({a[16:32], c[16:32], d[16:32]}) == 3
    assert len({a[:16], d[:16]}) == 2
    assert len({a[48:], b[48:], c[48:], d[48:]}) == 4


def test_a_prompt_that_is_all_shared_still_ends_on_its_own() -> None:
    trace = [TraceRequest(0.0, 1024, 8, (1, 2)), TraceRequest(1.0, 1024, 8, (1, 2))]
    a, b = (str(p.prompt) for p in plan_pass(trace, EXACT))
    assert len(a) == 32
    assert a[:16] == b[:16]
    assert a[16:] != b[16:]


def test_passes_share_blocks_and_nothing_else() -> None:
    trace = [TraceRequest(0.0, 4096, 8, (1,))]
    (first,), (second,) = (plan_pass(trace, EXACT, number=n) for n in (0, 1))
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert first.request_id != second.request_id


def test_without_block_ids_types_share_a_quarter_every_second_time() -> None:
    trace = [TraceRequest(float(n), 3200, 8) for n in range(40)]
    heads = Counter(str(p.prompt)[:25] for p in plan_pass(trace, EXACT))
    assert sorted(heads.values())[-2:] == [1, 20]
    assert {len(p.prompt) for p in plan_pass(trace, EXACT)} == {100}


def test_spread_stays_within_the_rounding_and_in_order() -> None:
    trace = [TraceRequest(3.0 * (n // 10), 100, 10) for n in range(100)]
    plan = plan_pass(trace, Scale(arrival=1.0, spread_seconds=3.0))
    arrivals = [p.arrival_seconds for p in plan]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 100
    assert max(arrivals) <= 30.0


def test_a_few_clients_leave() -> None:
    trace = [TraceRequest(0.0, 100, 1000)] * 1000
    left = sum(p.abort_after_token_events is not None for p in plan_pass(trace, EXACT))
    assert 5 <= left <= 45
    assert plan_pass(trace, EXACT, seed=1) == plan_pass(trace, EXACT, seed=1)


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.none() | st.lists(st.integers(0, 9), max_size=40),
    st.floats(0.001, 1.0),
)
def test_every_request_can_be_sent(
    prompt: int, output: int, prefix: list[int] | None, factor: float
) -> None:
    request = TraceRequest(0.0, prompt, output, None if prefix is None else tuple(prefix))
    scale = Scale(prompt=factor, output=factor)
    (planned,) = plan_pass([request], scale)
    assert 1 <= len(planned.prompt) <= scale.max_prompt_tokens
    assert 1 <= planned.max_tokens <= scale.max_output_tokens


@pytest.mark.parametrize("name", ["arrival", "prompt", "output", "max_prompt_tokens"])
def test_factors_are_above_zero(name: str) -> None:
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=name):
            Scale(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spread_seconds"):
        Scale(spread_seconds=-1.0)


TRACE = [TraceRequest(0.01 * n, 500, 10) for n in range(5)]
FAST = Scale(arrival=1.0, spread_seconds=0.0)


async def test_an_engine_that_is_away_is_counted_not_raised() -> None:
    reported: list[int] = []
    progress = await replay(
        NOBODY, TRACE, FAST, passes=3, on_progress=lambda p: reported.append(p.ended)
    )
    assert (progress.passes, progress.ended) == (3, 15)
    assert progress.outcomes == {"error": 15}
    assert progress.request_types == {"chat": 15}
    assert "Connect" in progress.last_detail
    assert reported == list(range(1, 16))


async def test_it_goes_on_until_it_is_told_to_stop() -> None:
    stop = asyncio.Event()

    def enough(progress: Progress) -> None:
        if progress.passes >= 4:
            stop.set()

    progress = await replay(NOBODY, TRACE, FAST, stop=stop, on_progress=enough)
    assert progress.passes == 4


async def test_what_it_refuses() -> None:
    with pytest.raises(RemoteTargetError):
        await replay("http://10.0.0.1", TRACE)
    with pytest.raises(ValueError, match="trace: empty"):
        await replay(NOBODY, [])

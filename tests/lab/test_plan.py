"""Plans of mixed load: the types, the lengths, what is shared, and that a seed repeats them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.lab.plan import FOUR_TYPES, mixed_plan
from servoscope.lab.prompt import PromptMaker
from servoscope.lab.request import CHAT, COMPLETIONS

SHAPES = {shape.name: shape for shape in FOUR_TYPES}


def test_four_types_in_turn_within_their_lengths() -> None:
    plan = mixed_plan(100, seed=1, vocabulary=range(5, 2048))
    assert Counter(p.request_type for p in plan) == dict.fromkeys(SHAPES, 25)
    for planned in plan:
        shape = SHAPES[planned.request_type or ""]
        assert shape.prompt_tokens[0] <= len(planned.prompt) <= shape.prompt_tokens[1]
        assert shape.output_tokens[0] <= planned.max_tokens <= shape.output_tokens[1]
        assert planned.endpoint == shape.endpoint
        assert isinstance(planned.prompt, str if planned.endpoint == CHAT else tuple)
    assert len({p.request_id for p in plan}) == 100


def test_prefixes_are_shared_within_a_type_only() -> None:
    plan = mixed_plan(400, seed=2, shared_share=0.5)
    heads = {name: Counter[str]() for name in SHAPES}
    for planned in plan:
        shape = SHAPES[planned.request_type or ""]
        lead = shape.prompt_tokens[0] * 6 // 10
        assert isinstance(planned.prompt, str)
        heads[shape.name][planned.prompt[:lead]] += 1
    for counts in heads.values():
        shared = [n for n in counts.values() if n > 1]
        assert len(shared) == 3
        assert 30 <= sum(shared) <= 70
    assert len({head for counts in heads.values() for head in counts if counts[head] > 1}) == 12
    alone = mixed_plan(50, seed=2, shared_share=0.0)
    assert len({str(p.prompt)[:20] for p in alone}) == 50


def test_a_seed_repeats_the_plan() -> None:
    assert mixed_plan(20, seed=3, abort_share=0.3) == mixed_plan(20, seed=3, abort_share=0.3)
    assert mixed_plan(20, seed=3) != mixed_plan(20, seed=4)


def test_shares_of_aborts_and_streams() -> None:
    plan = mixed_plan(1000, seed=5, abort_share=0.2, streaming_share=0.7)
    early = sum(p.abort_after_seconds is not None for p in plan)
    late = sum(p.abort_after_token_events is not None for p in plan)
    assert 150 <= early + late <= 250
    assert abs(early - late) <= 1
    assert 650 <= sum(p.streaming for p in plan) <= 750
    clean = mixed_plan(50)
    assert all(p.streaming and p.abort_after_seconds is None for p in clean)
    assert all(p.abort_after_token_events is None for p in clean)


def test_arrivals() -> None:
    plan = mixed_plan(2000, seed=6, rate_per_second=50.0)
    arrivals = [p.arrival_seconds for p in plan]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40.0, rel=0.15)
    assert {p.arrival_seconds for p in mixed_plan(10)} == {0.0}


def test_what_is_passed_on() -> None:
    plan = mixed_plan(4, model="m", send_request_type=False, request_id_prefix="x", temperature=0.5)
    assert {p.model for p in plan} == {"m"}
    assert not any(p.send_request_type for p in plan)
    assert plan[3].request_id == "x-0-3"
    assert plan[0].temperature == 0.5
    assert {p.endpoint for p in plan} == {CHAT, COMPLETIONS}


@given(st.text(max_size=10), st.integers(1, 500), st.floats(0.1, 8.0), st.integers(0, 5))
def test_pieces_have_their_length_and_repeat(key: str, tokens: int, each: float, seed: int) -> None:
    maker = PromptMaker(seed, each)
    text = maker.text(key, tokens)
    assert len(text) == max(1, round(tokens * each))
    assert text.isascii()
    assert text == PromptMaker(seed, each).text(key, tokens)
    ids = maker.ids(key, tokens, range(5, 9))
    assert len(ids) == tokens
    assert set(ids) <= {5, 6, 7, 8}


def test_a_longer_piece_of_a_key_begins_with_the_shorter() -> None:
    maker = PromptMaker(1)
    assert maker.text("k", 100).startswith(maker.text("k", 40))
    assert maker.text("k", 40) != maker.text("l", 40)
    assert maker.text("k", 40) != PromptMaker(2).text("k", 40)


@pytest.mark.parametrize("tokens", [0, -1, 10**9])
def test_lengths_out_of_bounds(tokens: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        PromptMaker().text("k", tokens)
    with pytest.raises(ValueError, match="tokens"):
        PromptMaker().ids("k", tokens, range(9))

"""llama.cpp's /slots: captured, of old builds, with text in it, hostile."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.llamacpp.slots import read_slots

CAPTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "llamacpp" / "b11549"
CANARY = "CANARY5511"


def slot(number: int = 0, *, busy: Any = True, context: Any = 2048, held: Any = 512) -> Any:
    return {"id": number, "n_ctx": context, "is_processing": busy, "n_prompt_tokens": held}


def old_slot(number: int, *, busy: bool) -> Any:
    """As builds of 2024 had it: parameters and prompt beside the numbers, no tokens held."""
    return {
        "id": number, "id_task": 5, "n_ctx": 4096, "n_predict": -1, "state": int(busy),
        "stop": [f"{CANARY} stop"], "grammar": CANARY, "prompt": f"{CANARY} text",
        "next_token": {"has_next_token": busy, "n_remain": -1, "n_decoded": 17,
                       "stopping_word": CANARY},
    }  # fmt: skip


def test_the_captured_busy_one() -> None:
    slots = read_slots((CAPTURES / "slots_busy.json").read_bytes(), unified=False)
    told = json.loads((CAPTURES / "slots_busy.json").read_text())
    assert (slots.total, slots.processing, slots.context_tokens) == (4, 2, 2048)
    # n_prompt_tokens is more than the prompt: what was generated is in it.
    working = [one for one in told if one["is_processing"]]
    parts = ("n_prompt_tokens_processed", "n_prompt_tokens_cache")
    exact = sum(one[part] for one in working for part in parts)
    exact += sum(one["next_token"][0]["n_decoded"] for one in working)
    assert slots.held_tokens == exact == 501 + 502
    assert slots.sample.total("running") == 2
    assert slots.sample.peak("kv_usage_ratio") == exact / (4 * 2048)
    assert (slots.carries_text, slots.sample.refused) == (False, ())


def test_the_captured_idle_one() -> None:
    slots = read_slots((CAPTURES / "slots_idle.json").read_bytes(), unified=False)
    assert (slots.total, slots.processing, slots.held_tokens) == (4, 0, 0)
    assert slots.sample.total("running") == 0
    assert slots.sample.peak("kv_usage_ratio") == 0


def test_text_of_people_is_noticed_and_nothing_of_it_is_kept() -> None:
    text = (CAPTURES / "slots_debug.json").read_text()
    assert "CANARY prompt" in text
    slots = read_slots(text, unified=False)
    assert slots.carries_text
    assert slots.processing == 2
    assert "CANARY" not in repr(dataclasses.asdict(slots))


def test_a_build_of_2024_tells_who_works_and_not_what_the_cache_holds() -> None:
    slots = read_slots(json.dumps([old_slot(0, busy=True), old_slot(1, busy=False)]), unified=False)
    assert (slots.total, slots.processing, slots.context_tokens) == (2, 1, 4096)
    assert slots.carries_text
    assert slots.held_tokens is None
    assert slots.sample.peak("kv_usage_ratio") is None
    assert CANARY not in repr(slots)


@pytest.mark.parametrize(
    ("unified", "expected"), [(False, 1024 / 4096), (True, 1024 / 2048), (None, None)]
)
def test_how_full_the_cache_is_depends_on_who_shares_it(
    unified: bool | None, expected: float | None
) -> None:
    slots = read_slots(json.dumps([slot(0), slot(1)]), unified=unified)
    assert slots.held_tokens == 1024
    assert slots.sample.peak("kv_usage_ratio") == expected
    assert slots.sample.total("running") == 2


def test_one_slot_has_the_cache_to_itself() -> None:
    slots = read_slots(json.dumps([slot()]), unified=None)
    assert slots.sample.peak("kv_usage_ratio") == 0.25


def test_what_idle_slots_hold_is_not_in_use() -> None:
    slots = read_slots(json.dumps([slot(0), slot(1, busy=False, held=2000)]), unified=False)
    assert slots.held_tokens == 512


def test_all_working_slots_together_cannot_hold_more_than_one_cache() -> None:
    slots = read_slots(json.dumps([slot(n, held=2000) for n in range(3)]), unified=True)
    assert slots.sample.peak("kv_usage_ratio") is None
    assert [r.name for r in slots.sample.refused] == ["n_prompt_tokens"]
    assert slots.sample.total("running") == 3


@pytest.mark.parametrize("bad", [-1, 10**12, "text", 1.5, True, [], float("nan")])
def test_a_bad_number_is_refused_by_its_name_and_the_rest_kept(bad: Any) -> None:
    slots = read_slots(json.dumps([slot(0, held=bad), slot(1)]), unified=False)
    assert [r.name for r in slots.sample.refused] == ["slots[0].n_prompt_tokens"]
    assert slots.sample.total("running") == 2
    assert slots.held_tokens is None
    context = read_slots(json.dumps([slot(0), slot(1, context=bad, held=5)]), unified=False)
    assert [r.name for r in context.sample.refused] == ["slots[1].n_ctx"]
    assert context.context_tokens is None
    assert context.sample.total("running") == 2


def test_more_than_its_context_is_in_no_slot() -> None:
    slots = read_slots(json.dumps([slot(held=2049)]), unified=False)
    assert slots.sample.refused[0].why == "outside 0..2048"


@pytest.mark.parametrize("bad", [f"{CANARY} yes", 1, None, [CANARY]])
def test_a_slot_that_does_not_say_whether_it_works_makes_the_count_unknown(bad: Any) -> None:
    slots = read_slots(json.dumps([slot(0), slot(1, busy=bad)]), unified=False)
    assert slots.processing is None
    assert slots.sample.total("running") is None
    assert CANARY not in repr(slots)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'"CANARY5511"', b"\xff\xfe", b"[" * 100_000, b"[" + b"9" * 9_999],
)
def test_what_is_no_list_of_slots_is_an_error_without_the_text(text: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON list of slots") as caught:
        read_slots(text, unified=False)
    assert CANARY not in str(caught.value)
    assert caught.value.__context__ is None  # the parser's error would hold the whole answer


def test_a_list_without_end_is_no_list_of_slots() -> None:
    with pytest.raises(ValueError, match="more than 4096 slots"):
        read_slots(json.dumps([{}] * 4097), unified=False)


def test_what_is_no_object_is_refused_in_its_place() -> None:
    slots = read_slots(json.dumps([slot(0), CANARY]), unified=False)
    assert [r.name for r in slots.sample.refused] == ["slots[1]"]
    assert (slots.total, slots.processing) == (2, None)
    assert CANARY not in repr(slots)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["n_ctx", "is_processing", "n_prompt_tokens", "state", "prompt", "id"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(told=st.lists(JSON, min_size=1, max_size=6), unified=st.sampled_from([True, False, None]))
def test_any_json_is_read_or_refused(told: list[Any], unified: bool | None) -> None:
    slots = read_slots(json.dumps(told), unified=unified)
    assert slots.total == len(told)
    for reading in slots.sample.readings:
        assert reading.value >= 0
    usage = slots.sample.peak("kv_usage_ratio")
    assert usage is None or 0 <= usage <= 1
    running = slots.sample.total("running")
    assert running is None or running <= slots.total


@given(text=st.binary(max_size=200))
def test_bytes_that_are_no_json_end_in_one_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="slots"):
        read_slots(b"{" + text, unified=None)

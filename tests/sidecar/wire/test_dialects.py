from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.dialects import anthropic, llamacpp, openai, responses
from servoscope.sidecar.wire.endpoints import ENDPOINTS, Reader, endpoint_of
from sidecar.wire.talk import delta, usage


def answer() -> Answer:
    return Answer(gap_limit=8)


def first_token_index(read: Any, events: list[dict[str, Any]]) -> tuple[Answer, int | None]:
    subject = answer()
    for at, event in enumerate(events):
        read(event, subject, float(at))
    first = subject.first_token_at
    return subject, None if first is None else int(first)


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a"},
        {"reasoning": "a"},
        {"reasoning_content": "a"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
        {"token_ids": [5]},
        {"role": "assistant", "content": "a"},
        {"content": ""},  # vLLM: a token whose bytes are not yet whole
    ],
)
def test_events_that_carry_a_token(fields: dict[str, Any]) -> None:
    _, first = first_token_index(openai.read, [delta(role="assistant"), delta(**fields)])
    assert first == 1


@pytest.mark.parametrize(
    "event",
    [
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(),
        delta(content=None),
        delta(tool_calls=[]),
        usage(3, 0),
        {"choices": [], "prompt_progress": {"total": 5}},
        delta(content="", finish="stop"),
        delta(role="assistant", content="") | {"prompt_progress": {"total": 5}},
        delta(content="x") | {"prompt_progress": {"total": 5}},
        {"choices": [None, 5, "x"]},
        {"choices": {"a": 1}},
    ],
)
def test_events_that_carry_none(event: dict[str, Any]) -> None:
    assert first_token_index(openai.read, [event])[1] is None


def test_completions_text_and_choice_token_ids() -> None:
    blank = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    assert first_token_index(openai.read, [blank])[1] is None
    text = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    assert first_token_index(openai.read, [blank, text])[1] == 1
    ids = {"choices": [{"index": 0, "text": "", "token_ids": [3], "finish_reason": "length"}]}
    assert first_token_index(openai.read, [blank, ids])[1] == 1


def test_reasoning_is_a_token_but_not_the_answer() -> None:
    subject, first = first_token_index(
        openai.read, [delta(reasoning_content="hm"), delta(content=""), delta(content="yes")]
    )
    assert (first, subject.first_answer_at) == (0, 2.0)
    assert subject.gaps == [1.0, 1.0]


def test_finish_reason_moves_the_last_token_and_ends_the_answer() -> None:
    subject, _ = first_token_index(
        openai.read,
        [delta(content="a"), delta(content="b"), delta(finish="length"), usage(5, 3, 4)],
    )
    assert (subject.last_token_at, subject.terminal_at, subject.finish_reason) == (2, 2, "length")
    assert (subject.prompt_tokens, subject.output_tokens, subject.cached_tokens) == (5, 3, 4)
    assert subject.token_events == 2


def test_two_choices_end_when_both_have() -> None:
    subject, _ = first_token_index(
        openai.read,
        [delta(0, content="a"), delta(1, content="b"), delta(0, finish="stop")],
    )
    assert (subject.sequences, subject.terminal_at) == (2, None)
    openai.read(delta(1, finish="length"), subject, 9.0)
    assert (subject.terminal_at, subject.finish_reason) == (9.0, "length")


def test_worst_finish_reason_wins() -> None:
    subject = answer()
    for reason in ("stop", "error", "length"):
        subject.finish(reason, 1.0)
    assert subject.finish_reason == "error"


def test_gaps_are_bounded_but_the_largest_is_kept() -> None:
    subject = answer()
    for at in [*range(20), 120]:
        subject.token(float(at), answer=True)
    assert len(subject.gaps) == 8
    assert subject.max_gap == 101.0


def test_llamacpp_native_stream() -> None:
    events: list[dict[str, Any]] = [
        {"index": 0, "content": "", "tokens": [], "stop": False, "prompt_progress": {"total": 9}},
        {"index": 0, "content": "a", "tokens": [3], "stop": False},
        {
            "index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit",
            "model": "m.gguf", "tokens_predicted": 4, "tokens_evaluated": 701,
            "timings": {"cache_n": 700, "prompt_n": 1, "prompt_ms": 2.5, "predicted_n": 4,
                        "predicted_ms": 30},
        },
    ]  # fmt: skip
    subject, first = first_token_index(llamacpp.read, events)
    assert first == 1
    assert subject.progress
    assert (subject.finish_reason, subject.terminal_at, subject.model_name) == (
        "length",
        2.0,
        "m.gguf",
    )
    counts = (subject.prompt_tokens, subject.cached_tokens, subject.output_tokens)
    assert counts == (701, 700, 4)
    assert (subject.engine_prefill_seconds, subject.engine_decode_seconds) == (0.0025, 0.03)


def test_llamacpp_timings_do_not_overrule_usage() -> None:
    subject = answer()
    timings = {"cache_n": 2, "prompt_n": 3, "predicted_n": 4, "prompt_ms": 1, "predicted_ms": 1}
    openai.read(usage(9, 4, 7) | {"timings": timings}, subject, 1.0)
    counts = (subject.prompt_tokens, subject.cached_tokens, subject.output_tokens)
    assert counts == (9, 7, 4)


@pytest.mark.parametrize("bad", [-1, "3", 1.5, True, None, []])
def test_odd_counts_change_nothing(bad: Any) -> None:
    subject = answer()
    openai.read({"usage": {"prompt_tokens": bad, "completion_tokens": 3}}, subject, 1.0)
    assert subject.prompt_tokens is None
    assert subject.output_tokens == 3


@pytest.mark.parametrize("bad", [-1, "3", True, None, float("nan"), float("inf")])
def test_odd_timings_change_nothing(bad: Any) -> None:
    subject = answer()
    llamacpp.read_timings({"predicted_n": 2, "prompt_ms": bad, "predicted_ms": 5}, subject)
    assert subject.engine_prefill_seconds is None
    assert subject.engine_decode_seconds == 0.005


def test_llamacpp_before_cache_n_does_not_say_how_long_the_prompt_was() -> None:
    """``prompt_n`` alone leaves out what was cached: 1 for a prompt that was seen before."""
    subject = answer()
    llamacpp.read_timings({"prompt_n": 1, "predicted_n": 4}, subject)
    assert (subject.prompt_tokens, subject.cached_tokens, subject.output_tokens) == (None, None, 4)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"stopped_limit": True}, "length"),  # builds before December 2024
        ({"stopped_limit": False, "stopped_eos": True}, "stop"),
        ({"stop_type": "limit"}, "length"),
        ({"stop_type": "word", "stopping_word": "x"}, "stop"),
        ({"stopped_limit": "yes"}, "stop"),
    ],
)
def test_llamacpp_ends_of_all_builds(event: dict[str, Any], reason: str) -> None:
    subject = answer()
    llamacpp.read({"stop": True, **event}, subject, 1.0)
    assert subject.finish_reason == reason


def test_llamacpp_timings_of_every_token_count_the_latest_of_each_choice() -> None:
    """``timings_per_token``: every event carries those of its choice so far."""
    subject = answer()
    for index, tokens in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        event = {"choices": [{"index": index, "delta": {"content": "x"}}]}
        openai.read(event | {"timings": {"predicted_n": tokens}}, subject, 1.0)
    assert subject.output_tokens == 5
    openai.read({"choices": [{"index": 2, "delta": {"content": "x"}}]}, subject, 2.0)
    assert subject.output_tokens is None  # of one of three choices nothing is told yet


def test_llamacpp_whole_answers_tell_the_tokens_of_one_choice_of_two() -> None:
    subject = answer()
    choices = [{"index": n, "text": "x", "finish_reason": "length"} for n in range(2)]
    event = usage(5, 3, 4) | {"choices": choices, "timings": {"predicted_n": 3, "cache_n": 4}}
    openai.read(event, subject, None)
    assert (subject.sequences, subject.output_tokens) == (2, None)
    assert (subject.prompt_tokens, subject.cached_tokens) == (5, 4)


def test_responses_stream() -> None:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "m", "error": None}},
        {"type": "response.output_item.added", "item": {}},
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.output_text.delta", "delta": "yes"},
        {"type": "response.output_text.done", "text": "yes"},
        {
            "type": "response.incomplete",
            "response": {
                "id": "resp_1",
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "usage": {
                    "input_tokens": 9,
                    "output_tokens": 2,
                    "input_tokens_details": {"cached_tokens": 8},
                },
            },
        },
    ]
    subject, first = first_token_index(responses.read, events)
    assert (first, subject.first_answer_at, subject.terminal_at) == (2, 3.0, 5.0)
    assert (subject.finish_reason, subject.response_id) == ("length", "resp_1")
    counts = (subject.prompt_tokens, subject.cached_tokens, subject.output_tokens)
    assert counts == (9, 8, 2)


@pytest.mark.parametrize(
    ("status", "reason"),
    [("completed", "stop"), ("failed", "error"), ("cancelled", "cancelled"), ("queued", None)],
)
def test_responses_whole(status: str, reason: str | None) -> None:
    subject = answer()
    responses.read({"id": "resp_1", "status": status, "error": None}, subject, None)
    assert subject.finish_reason == reason


def test_anthropic_stream() -> None:
    events: list[dict[str, Any]] = [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "model": "m",
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 6, "output_tokens": 0},
                "stop_reason": None,
            },
        },
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "yes"}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ]
    subject, first = first_token_index(anthropic.read, events)
    assert (first, subject.first_answer_at, subject.token_events) == (2, 3.0, 2)
    assert (subject.finish_reason, subject.terminal_at) == ("length", 5.0)
    counts = (subject.prompt_tokens, subject.cached_tokens, subject.output_tokens)
    assert counts == (9, 6, 2)


@pytest.mark.parametrize("read", [openai.read, llamacpp.read, openai.read_answer])
def test_error_event(read: Any) -> None:
    subject = answer()
    read({"error": {"message": "boom", "code": 500}}, subject, 1.0)
    assert subject.error


_keys = st.sampled_from(
    [
        "choices", "delta", "index", "finish_reason", "usage", "timings", "error", "type",
        "response", "message", "content", "text", "stop", "prompt_tokens_details", "status",
        "incomplete_details", "tool_calls", "token_ids", "predicted_n", "prompt_ms", "id", "model",
    ]
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)


READERS = sorted({endpoint.read for endpoint in ENDPOINTS.values()}, key=lambda r: r.__module__)


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=80)
@given(event=st.dictionaries(_keys, json_values, max_size=6), streamed=st.booleans())
def test_odd_events_never_raise(read: Reader, event: dict[str, Any], streamed: bool) -> None:
    subject = answer()
    read(event, subject, 1.0 if streamed else None)


@pytest.mark.parametrize(
    ("method", "target", "path"),
    [
        (b"POST", b"/v1/chat/completions", "/v1/chat/completions"),
        (b"POST", b"/v1/chat/completions/?a=b", "/v1/chat/completions"),
        (b"POST", b"/models/a/v1/completions", "/v1/completions"),
        (b"POST", b"/completion", "/completion"),
        (b"GET", b"/v1/chat/completions", None),
        (b"POST", b"/tokenize", None),
        (b"POST", b"/v1/chat/completions/x", None),
        (b"POST", b"/v1/v1/unknown", None),
        (b"POST", b"", None),
    ],
)
def test_endpoint_of(method: bytes, target: bytes, path: str | None) -> None:
    found = endpoint_of(method, target)
    assert (found.path if found else None) == path

"""The client's reader of answers: which event carries a token, and what it refuses."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.lab.stream import MAX_LINE_BYTES, AnswerReader, StreamError


def sse(*events: dict[str, Any] | bytes) -> bytes:
    return b"".join(
        b"data: " + (e if isinstance(e, bytes) else orjson.dumps(e)) + b"\n\n" for e in events
    )


def text(piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": piece, "finish_reason": finish} | more
    return {"id": "cmpl-1", "choices": [choice]}


def delta(finish: str | None = None, **part: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": part, "finish_reason": finish}]}


USAGE = {
    "id": "cmpl-1",
    "choices": [],
    "usage": {
        "prompt_tokens": 70,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 64},
    },
}


def read(*timed: tuple[dict[str, Any] | bytes, float]) -> AnswerReader:
    reader = AnswerReader()
    for event, at in timed:
        reader.feed(sse(event), at)
    return reader


def test_completions_stream() -> None:
    reader = read(
        (text("a"), 1.0), (text("b"), 2.0), (text("c", "length"), 5.0), (USAGE, 6.0), (b"[DONE]", 7)
    )
    assert (reader.first_token_at, reader.last_token_at) == (1.0, 5.0)
    assert reader.tpot_seconds == pytest.approx(4.0 / 4)
    assert reader.token_events == 3
    assert (reader.prompt_tokens, reader.cached_tokens, reader.output_tokens) == (70, 64, 5)
    assert (reader.finish_reason, reader.response_id, reader.done) == ("length", "cmpl-1", True)
    assert reader.text_sha256 == hashlib.sha256(b"abc").hexdigest()


def test_the_role_chunk_carries_no_token() -> None:
    reader = read((delta(role="assistant", content=""), 1.0), (delta(content="x"), 2.0))
    assert reader.first_token_at == 2.0
    assert reader.token_events == 1


@pytest.mark.parametrize(
    "part",
    [
        {"content": "x"},
        {"reasoning": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"token_ids": [7]},
        {"role": "assistant", "content": "x"},
        {"content": ""},  # a token whose bytes are held back
    ],
)
def test_what_carries_a_token(part: dict[str, Any]) -> None:
    assert read((delta(**part), 3.0)).first_token_at == 3.0


@pytest.mark.parametrize(
    "event",
    [
        delta(role="assistant"),
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta("length"),
        text("", "stop"),
        text("") | {"prompt_progress": {"total": 100, "processed": 50}},
        USAGE,
        {"id": "x", "choices": []},
        {"id": "x"},
    ],
)
def test_what_carries_none(event: dict[str, Any]) -> None:
    reader = read((event, 3.0))
    assert reader.first_token_at is None
    assert reader.token_events == 0


def test_the_finish_event_ends_the_last_token() -> None:
    """llama.cpp's last event has no text; vLLM's last token is in it, text or not."""
    reader = read((text("a"), 1.0), (text("", "length"), 3.0), (USAGE, 9.0))
    assert reader.token_events == 1
    assert reader.last_token_at == 3.0


def test_tpot_needs_two_tokens() -> None:
    one = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    assert read((text("a", "stop"), 1.0), (one, 1.5)).tpot_seconds is None
    assert read((text("a", "stop"), 1.0)).tpot_seconds is None


def test_llamacpp_timings_say_what_was_cached() -> None:
    final = text("", "length") | {
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
        "timings": {"cache_n": 8, "prompt_n": 1},
    }
    assert read((final, 1.0)).cached_tokens == 8


def test_errors_in_the_stream() -> None:
    assert read(({"error": {"message": "slot lost", "code": 500}}, 1.0)).error == "slot lost"
    assert read(({"error": "bad"}, 1.0)).error == "bad"
    reader = AnswerReader()
    reader.feed(b'error: {"message":"old form"}\n\n', 1.0)
    assert reader.error == '{"message":"old form"}'


def test_comments_blank_lines_and_carriage_returns() -> None:
    reader = AnswerReader()
    reader.feed(b": ping\r\n\r\nevent: x\r\n" + sse(text("a")).replace(b"\n", b"\r\n"), 1.0)
    assert reader.token_events == 1


def test_whole_bodies() -> None:
    reader = AnswerReader()
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    reader.body(orjson.dumps(USAGE | {"choices": [choice]}))
    assert (reader.finish_reason, reader.output_tokens) == ("stop", 5)
    assert reader.first_token_at is None
    assert reader.text_sha256 == hashlib.sha256(b"hello").hexdigest()


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b"data: 3\n\n", b"data: x\n"])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(StreamError):
        AnswerReader().feed(data, 1.0)


def test_a_line_without_end_is_refused_not_kept() -> None:
    reader = AnswerReader()
    reader.feed(b"x" * MAX_LINE_BYTES, 1.0)
    with pytest.raises(StreamError, match="longer than"):
        reader.feed(b"x", 1.0)


@pytest.mark.parametrize("value", [-1, True, "5", 1.5, None, [5]])
def test_a_count_that_is_none_is_not_believed(value: Any) -> None:
    event = {"choices": [], "usage": {"prompt_tokens": value, "completion_tokens": value}}
    reader = read((event, 1.0))
    assert reader.prompt_tokens is None
    assert reader.output_tokens is None


@given(
    st.lists(st.text(max_size=6), min_size=1, max_size=8),
    st.lists(st.integers(1, 400), max_size=30),
)
def test_how_the_bytes_are_cut_changes_nothing(pieces: list[str], cuts: list[int]) -> None:
    data = sse(*(text(p) for p in pieces), text("", "length"), USAGE, b"[DONE]")
    whole, parts = AnswerReader(), AnswerReader()
    whole.feed(data, 1.0)
    begin = 0
    for cut in cuts:
        parts.feed(data[begin : begin + cut], 1.0)
        begin += cut
    parts.feed(data[begin:], 1.0)
    for name in ("token_events", "text_sha256", "finish_reason", "output_tokens", "done"):
        assert getattr(parts, name) == getattr(whole, name)
    assert whole.token_events == len(pieces)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_ignored(data: bytes) -> None:
    reader = AnswerReader()
    try:
        reader.feed(data + b"\n", 1.0)
    except StreamError:
        return
    assert reader.output_tokens is None or reader.output_tokens >= 0

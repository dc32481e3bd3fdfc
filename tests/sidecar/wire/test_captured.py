"""Streams captured from real engines: right numbers, and the same however the bytes are cut."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.exporters.records import Outcome, Phase, RequestRecord
from servoscope.sidecar.wire.exchange import Direction
from sidecar.wire.talk import (
    FIXTURES,
    chunk,
    delta,
    event,
    exchange,
    pieces,
    request,
    stream_head,
    whole,
)

CAPTURED = sorted(path.with_suffix("") for path in FIXTURES.glob("*/*.request"))
NAMES = [f"{path.parent.name}/{path.name}" for path in CAPTURED]

LLAMACPP, VLLM = "llamacpp-b11549", "vllm-0.32.0"


def load(path: Path) -> tuple[bytes, bytes]:
    return path.with_suffix(".request").read_bytes(), path.with_suffix(".response").read_bytes()


def read(asked: bytes, answered: bytes, cuts: list[int] | None = None) -> RequestRecord:
    """One record; request at 1 s, each piece of the response at 2 s."""
    subject = exchange()
    records: list[RequestRecord] = []
    for piece in pieces(asked, cuts or []):
        records += subject.client_bytes(piece, 1.0)
    for piece in pieces(answered, cuts or []):
        records += subject.server_bytes(piece, 2.0)
    records += subject.server_closed(3.0)
    assert len(records) == 1
    assert not subject.drops
    return records[0]


def test_there_are_captures_of_two_engines() -> None:
    assert {path.parent.name for path in CAPTURED} == {LLAMACPP, VLLM}
    assert len(CAPTURED) >= 20


@pytest.mark.parametrize("path", CAPTURED, ids=NAMES)
def test_every_capture_ends_as_it_did(path: Path) -> None:
    record = read(*load(path))
    if path.name == "bad_request":
        assert (record.outcome, record.status_code) == (Outcome.CLIENT_ERROR, 400)
        return
    assert record.outcome in (Outcome.LENGTH, Outcome.COMPLETED)
    assert record.phase is Phase.DECODE
    assert record.request_type_hint == "chat"
    streaming = "stream" in path.name
    assert record.streaming is streaming
    assert (record.time_to_first_token_seconds is not None) is streaming
    assert record.e2e_seconds == 1.0
    assert record.max_output_tokens == 8


def test_two_choices_have_no_tpot_and_the_tokens_of_both() -> None:
    """vLLM's usage counts the tokens of all choices, llama.cpp has one for each choice."""
    for engine in (VLLM, LLAMACPP):
        record = read(*load(FIXTURES / engine / "chat_stream_two"))
        assert (record.output_tokens, record.time_per_output_token_seconds) == (16, None)


@pytest.mark.parametrize("engine", [LLAMACPP, VLLM])
@pytest.mark.parametrize(
    ("name", "output", "has_tpot"),
    [
        ("chat_stream", 8, True),
        ("completions_stream", 8, True),
        ("responses_stream", 8, True),
        ("messages_stream", 8, True),
        ("chat_whole", 8, None),
        ("completions_whole", 8, None),
    ],
)
def test_output_tokens_are_the_answers_own(
    engine: str, name: str, output: int, has_tpot: bool | None
) -> None:
    record = read(*load(FIXTURES / engine / name))
    assert record.output_tokens == output
    if has_tpot is not None:
        assert (record.time_per_output_token_seconds is not None) is has_tpot


def test_vllm_says_no_counts_without_usage_and_llamacpp_does_in_timings() -> None:
    vllm = read(*load(FIXTURES / VLLM / "chat_stream_no_usage"))
    assert (vllm.output_tokens, vllm.time_per_output_token_seconds) == (None, None)
    llamacpp = read(*load(FIXTURES / LLAMACPP / "chat_stream_no_usage"))
    assert llamacpp.output_tokens == 8
    assert llamacpp.prefill_seconds is not None
    assert llamacpp.queue_seconds is not None


def test_vllm_response_id_is_the_request_id_with_its_prefix() -> None:
    record = read(*load(FIXTURES / VLLM / "completions_stream"))
    assert record.request_id == "cmpl-fixture-completions"


def test_llamacpp_native_endpoint_falls_back_to_the_request_id_header() -> None:
    record = read(*load(FIXTURES / LLAMACPP / "completion_stream"))
    assert record.request_id == "fixture-completion"
    assert (record.output_tokens, record.outcome) == (8, Outcome.LENGTH)


@pytest.mark.parametrize("path", CAPTURED, ids=NAMES)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, 6000), max_size=30))
def test_any_split_gives_the_same_record(path: Path, cuts: list[int]) -> None:
    asked, answered = load(path)
    assert read(asked, answered, cuts) == read(asked, answered)


@pytest.mark.parametrize("path", CAPTURED, ids=NAMES)
def test_byte_by_byte_gives_the_same_record(path: Path) -> None:
    asked, answered = load(path)
    assert read(asked, answered, list(range(len(answered)))) == read(asked, answered)


@pytest.mark.parametrize("path", CAPTURED, ids=NAMES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_damaged_capture_never_raises_and_leaves_nothing_open(
    path: Path, data: st.DataObject
) -> None:
    asked, answered = (bytearray(part) for part in load(path))
    for part in (asked, answered):
        for _ in range(data.draw(st.integers(0, 4))):
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(answered)))
    subject = exchange()
    records = subject.client_bytes(bytes(asked), 1.0)
    records += subject.server_bytes(bytes(answered[:cut]), 2.0)
    records += subject.client_closed(3.0, reset=True)
    records += subject.server_closed(4.0)
    assert len(records) <= 1
    assert subject.open_requests() == []


UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["client", "server", "gap", "fin", "server_fin", "reset", "shift"]),
            st.one_of(
                st.binary(max_size=80),
                st.sampled_from(
                    [
                        request(),
                        request()[:-4],
                        stream_head(),
                        chunk(event(delta(content="a"))),
                        chunk(event(delta(finish="stop"))),
                        b"0\r\n\r\n",
                        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
                        UPGRADED,
                    ]
                ),
            ),
        ),
        max_size=20,
    )
)
def test_any_conversation_never_raises(steps: list[tuple[str, bytes]]) -> None:
    subject = exchange()
    asked = 0
    records: list[RequestRecord] = []
    for at, (kind, data) in enumerate(steps):
        asked += data.count(b"POST /") if kind == "client" else 0
        match kind:
            case "client":
                records += subject.client_bytes(data, at)
            case "server":
                records += subject.server_bytes(data, at)
            case "gap":
                records += subject.gap(Direction.SERVER, at)
            case "fin":
                records += subject.client_closed(at)
            case "server_fin":
                records += subject.server_closed(at)
            case "reset":
                records += subject.client_closed(at, reset=True)
            case _:
                subject.shift_clock(0.0)
    records += subject.abandoned(99.0)
    assert len(records) <= asked
    for record in records:
        assert record.refuse_impossible(now=200.0) == []
    assert subject.open_requests() == []


# ---- no text is kept ----------------------------------------------------------------------------

CANARY = "canary-7f3a91"


def reachable(root: Any) -> list[Any]:
    """Everything that ``root`` holds, directly or not, short of modules and classes."""
    seen: dict[int, Any] = {}
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type) or type(item).__name__ == "module":
            continue
        seen[id(item)] = item
        if not callable(item) or hasattr(item, "__self__"):
            todo += gc.get_referents(item)
    return list(seen.values())


@pytest.mark.parametrize("end", ["complete", "reset", "gap", "server", "whole"])
def test_no_text_of_prompt_or_answer_stays(end: str) -> None:
    subject = exchange()
    body = {"stream": True, "messages": [{"role": "user", "content": f"{CANARY} prompt"}]}
    headers = f"Authorization: Bearer {CANARY}\r\n"
    asked = request(body, path=f"/v1/chat/completions?q={CANARY}", headers=headers)
    records = subject.client_bytes(asked[:-30], 1.0) + subject.client_bytes(asked[-30:], 1.5)
    token = chunk(event(delta(content=CANARY)))
    if end == "whole":
        answer = {"choices": [{"text": CANARY, "finish_reason": "stop"}], "usage": {}}
        records += subject.server_bytes(whole(answer), 2.0)
    else:
        records += subject.server_bytes(stream_head() + token + token[:-20], 2.0)
    if end == "complete":
        records += subject.server_bytes(token[-20:] + b"0\r\n\r\n", 3.0)
    elif end == "reset":
        records += subject.client_closed(3.0, reset=True)
    elif end == "server":
        records += subject.server_closed(3.0)
    elif end == "gap":
        records += subject.gap(Direction.SERVER, 3.0)
    assert len(records) == 1
    del body, asked, token
    assert CANARY not in repr(records)
    found = reachable([subject, records])
    assert any(isinstance(item, RequestRecord) for item in found)
    for item in found:
        if isinstance(item, str):
            assert CANARY not in item
        elif isinstance(item, (bytes, bytearray)):
            assert CANARY.encode() not in item

"""One line of SGLang's request file: captured ones of 0.5.23, older forms, and what cannot be."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.records import Outcome, Phase, Source
from servoscope.exporters.sglang.finish import outcome_of
from servoscope.exporters.sglang.requests import TEXT_PARAMETERS, RequestLine, read_line

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "sglang"
CANARY = "CANARY the prompt of somebody"
RECEIVED = 1_795_954_696.0


def line(parameters: dict[str, Any] | None = None, /, **fields: Any) -> bytes:
    """A line of 0.5.23 as it is written for a streamed answer of 24 tokens."""
    asked = {
        "rid": "r1", "stream": True, "sampling_params": {"max_new_tokens": 24, "n": 1},
        "custom_labels": {"tenant": "acme", "request_type": "chat"},
    }  # fmt: skip
    told = {
        "request_parameters": json.dumps(asked | (parameters or {})),
        "id": "r1", "finish_reason": {"type": "length", "length": 24}, "prompt_tokens": 60,
        "weight_version": "default", "num_retractions": 0, "queue_time": 0.006,
        "forward_entry_time": RECEIVED + 0.0146, "prefill_finished_time": RECEIVED + 0.0322,
        "completion_tokens": 24, "cached_tokens": 8, "dp_rank": None,
        "cached_tokens_details": {"device": 6, "host": 2}, "e2e_latency": 0.214,
        "request_received_ts": RECEIVED, "first_token_latency": 0.0351,
        "api_server_dispatch_finish_ts": RECEIVED + 0.0062,
        "response_sent_to_client_ts": RECEIVED + 0.0358,
        "request_finished_ts": RECEIVED + 0.214, "decode_throughput": 128.5,
    }  # fmt: skip
    whole = told | fields
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode()


def record(parameters: dict[str, Any] | None = None, /, **fields: Any) -> Any:
    found = read_line(line(parameters, **fields))
    assert found.record is not None
    return found.record


def captured(where: str) -> list[RequestLine]:
    path = FIXTURES / where / "request-metrics.jsonl"
    return [read_line(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("where", "in_full"),
    [
        ("0.5.11", False), ("0.5.12", False), ("0.5.16", False),
        ("0.5.23", True), ("0.5.23/ranks", True), ("0.5.23/labels", True),
    ],
)  # fmt: skip
def test_captured_lines_give_what_their_release_tells(where: str, in_full: bool) -> None:
    lines = captured(where)
    assert len(lines) >= 20
    assert not any(one.text or one.refused for one in lines)
    got = [one.record for one in lines if one.record is not None]
    assert len(got) == len(lines)
    streamed = [r for r in got if r.streaming]
    assert 0 < len(streamed) < len(got)
    for one in got:
        assert one.outcome is Outcome.LENGTH
        assert one.output_tokens in (4, 12, 20, 28, 36)  # as the capture asks
        assert one.prompt_tokens is not None
        assert one.queue_seconds is not None
        assert one.e2e_seconds is not None
        assert 0 <= one.queue_seconds < one.e2e_seconds
        assert one.preemptions == 0
        assert (one.prefill_seconds is not None) is in_full
        whole = one.time_to_first_token_seconds, one.time_per_output_token_seconds
        assert (None not in whole) is (in_full or one.streaming)
        if one.decode_seconds is not None and one.time_to_first_token_seconds is not None:
            parts = one.time_to_first_token_seconds + one.decode_seconds
            assert parts == pytest.approx(one.e2e_seconds, abs=0.05)
        assert one.refuse_impossible(now=2e9) == []
    assert sum(r.cached_tokens or 0 for r in got) > 0
    tenants = {"blue", "green"} if where.endswith("labels") else {""}
    assert {r.tenant for r in got} == tenants
    assert {r.request_type_hint for r in got} == ({"code"} if tenants != {""} else {None})


def test_every_event_is_where_the_module_says() -> None:
    got = record()
    assert (got.request_id, got.source, got.engine) == ("r1", Source.FILE, "sglang")
    assert (got.outcome, got.phase, got.finish_reason) == (Outcome.LENGTH, Phase.DECODE, "length")
    assert (got.prompt_tokens, got.output_tokens, got.cached_tokens) == (60, 24, 8)
    assert (got.max_output_tokens, got.preemptions, got.rank) == (24, 0, None)
    assert (got.tenant, got.request_type_hint, got.streaming) == ("acme", "chat", True)
    assert (got.model_name, got.model_version) == ("unknown", "unknown")
    assert got.received_unix_seconds == RECEIVED
    assert got.finished_unix_seconds == RECEIVED + 0.214
    assert got.first_token_unix_seconds == pytest.approx(RECEIVED + 0.0358)
    # A first chunk is handed over 0.7 ms after its token was seen: that is what a client waits.
    assert got.time_to_first_token_seconds == pytest.approx(0.0358, abs=1e-6)
    assert got.queue_seconds == 0.006
    assert got.prefill_seconds == pytest.approx(0.0176, abs=1e-6)
    assert got.time_per_output_token_seconds == pytest.approx(1 / 128.5)
    assert got.decode_seconds == pytest.approx(23 / 128.5)
    assert got.e2e_seconds == 0.214
    assert got.refuse_impossible(now=RECEIVED + 1) == []


def test_an_answer_in_one_piece_is_timed_in_the_scheduler() -> None:
    got = record({"stream": False}, response_sent_to_client_ts=RECEIVED + 0.22)
    assert got.streaming is False
    assert got.time_to_first_token_seconds == pytest.approx(0.0322, abs=1e-6)
    # The tokenizer manager sees every 50th token only: its own rate would be of another stretch.
    assert got.time_per_output_token_seconds == pytest.approx((0.214 - 0.0322) / 23, abs=1e-6)


def test_without_metrics_there_is_no_time_but_e2e() -> None:
    timed = (
        "queue_time", "forward_entry_time", "prefill_finished_time", "request_received_ts",
        "first_token_latency", "api_server_dispatch_finish_ts", "request_finished_ts",
        "decode_throughput", "response_sent_to_client_ts",
    )  # fmt: skip
    got = record(**dict.fromkeys(timed, ...))
    assert got.e2e_seconds == 0.214
    seconds = [n for n in dir(got) if n.endswith("_seconds") and n != "e2e_seconds"]
    assert {getattr(got, name) for name in seconds} == {None, ()}
    assert (got.phase, got.output_tokens) == (Phase.DECODE, 24)


def test_0_5_12_tells_no_first_token_latency() -> None:
    got = record(first_token_latency=...)
    assert got.time_to_first_token_seconds == pytest.approx(0.0358, abs=1e-6)


def test_0_5_9_names_the_ends_otherwise_and_counts_the_first_token() -> None:
    got = record(
        first_token_latency=..., forward_entry_time=..., prefill_finished_time=...,
        request_finished_ts=..., num_retractions=..., api_server_dispatch_finish_ts=...,
        prefill_finished_ts=RECEIVED + 0.0322, decode_finished_ts=RECEIVED + 0.214,
        total_retractions=2, decode_throughput=24 / 0.1782,
    )  # fmt: skip
    assert got.finished_unix_seconds == RECEIVED + 0.214
    assert got.decode_seconds == pytest.approx(0.1782)
    assert got.time_per_output_token_seconds == pytest.approx(0.1782 / 23)
    assert got.preemptions == 2
    assert got.queue_seconds is None  # with waits after retractions in it, and no bound


def test_the_wait_after_a_retraction_is_no_queue() -> None:
    got = record(num_retractions=1, queue_time=0.9)
    assert got.queue_seconds == pytest.approx(0.0084, abs=1e-6)  # dispatch to first forward pass


@pytest.mark.parametrize("handed", [RECEIVED - 3600, RECEIVED + 3600, RECEIVED + 0.0005])
def test_a_clock_that_was_set_in_between_does_not_make_a_ttft(handed: float) -> None:
    got = record(response_sent_to_client_ts=handed)
    assert got.time_to_first_token_seconds == pytest.approx(0.0351, abs=1e-6)


def test_embeddings_have_no_first_token() -> None:
    got = record(
        {"stream": ..., "sampling_params": None} | {"stream": None},
        completion_tokens=..., finish_reason=None, decode_throughput=...,
    )  # fmt: skip
    assert got.outcome is Outcome.COMPLETED
    assert got.time_to_first_token_seconds is None
    assert got.prefill_seconds is None
    assert got.queue_seconds == 0.006


def test_rank_version_and_adapter_are_told() -> None:
    got = record({"lora_path": "adapter-a"}, dp_rank=3, weight_version="step-900")
    assert (got.rank, got.model_version, got.model_name) == (3, "step-900", "adapter-a")


def test_tiers_are_summed_where_the_whole_is_not_told() -> None:
    assert record(cached_tokens=...).cached_tokens == 8


@pytest.mark.parametrize(
    ("reason", "outcome", "status"),
    [
        ({"type": "stop", "matched": "x"}, Outcome.COMPLETED, None),
        ({"type": "length", "length": 3}, Outcome.LENGTH, None),
        (None, Outcome.COMPLETED, None),
        ("stop", Outcome.COMPLETED, None),
        ({"type": "abort", "message": "Abort in waiting queue"}, Outcome.CANCELLED, None),
        ({"type": "abort", "message": "Aborted", "status_code": None}, Outcome.CANCELLED, None),
        (
            {"type": "abort", "message": "The request queue is full.", "status_code": 503},
            Outcome.REJECTED, 503,
        ),
        ({"type": "abort", "message": "The request queue is full."}, Outcome.REJECTED, None),
        (
            {"type": "abort", "message": "Request waiting timeout reached.", "status_code": 503},
            Outcome.TIMEOUT, 503,
        ),
        ({"type": "abort", "message": "too long", "status_code": 400}, Outcome.CLIENT_ERROR, 400),
        ({"type": "abort", "message": "oom", "status_code": 500}, Outcome.ERROR, 500),
        (
            {"type": "abort", "message": "Request is disconnected from the client side"},
            Outcome.CLIENT_DISCONNECT, None,
        ),
    ],
)  # fmt: skip
def test_how_it_ended(reason: object, outcome: Outcome, status: int | None) -> None:
    assert (outcome_of(reason)[0], outcome_of(reason)[2]) == (outcome, status)


def test_an_abort_keeps_no_word_of_its_message() -> None:
    reason = {"type": "abort", "message": f"Grammar failed: {CANARY}", "status_code": 400}
    got = record(finish_reason=reason, completion_tokens=0)
    assert (got.finish_reason, got.status_code) == ("abort", 400)
    assert "CANARY" not in repr(dataclasses.astuple(got))


def test_where_an_aborted_request_was() -> None:
    aborted = {"type": "abort", "message": "Aborted"}
    asked = {"finish_reason": aborted, "completion_tokens": 0}
    assert record(**asked, forward_entry_time=...).phase is Phase.QUEUED
    assert record(**asked).phase is Phase.PREFILL
    assert record(**asked | {"completion_tokens": 3}).phase is Phase.DECODE
    bare = read_line(json.dumps({"id": "r", "finish_reason": aborted, "e2e_latency": 1.5}).encode())
    assert bare.record is not None
    assert (bare.record.phase, bare.record.e2e_seconds) == (Phase.UNKNOWN, 1.5)


def test_the_pass_that_warms_the_cache_for_n_samples_is_no_request() -> None:
    nothing = {"finish_reason": {"type": "length", "length": 0}, "completion_tokens": 0}
    sampled = read_line(line({"sampling_params": {"n": 4}}, **nothing))
    assert (sampled.record, sampled.why) == (None, "warming_pass")
    untold = read_line(line({"sampling_params": None}, **nothing))  # log level 0
    assert (untold.record, untold.why) == (None, "warming_pass")
    assert read_line(line({"sampling_params": {"n": 1}}, **nothing)).record is not None


@pytest.mark.parametrize("name", TEXT_PARAMETERS)
def test_what_somebody_wrote_is_seen_and_not_kept(name: str) -> None:
    found = read_line(line({name: CANARY}, output_token_logprobs=[[-1.0, 5, CANARY]]))
    assert found.text
    assert "CANARY" not in repr(found)
    assert found.record is not None
    assert found.record.output_tokens == 24
    assert not read_line(line({name: None})).text
    # Where no version that was read has it: beside the parameters, or these as an object.
    for other in (line(**{name: CANARY}), line(request_parameters={name: CANARY, "stream": True})):
        found = read_line(other)
        assert found.text
        assert "CANARY" not in repr(found)


@pytest.mark.parametrize(
    ("field", "value", "attribute"),
    [
        ("queue_time", "soon", "queue_seconds"),
        ("queue_time", -1.0, "queue_seconds"),
        ("queue_time", math.nan, "queue_seconds"),
        ("e2e_latency", math.inf, "e2e_seconds"),
        ("e2e_latency", True, "e2e_seconds"),
        ("e2e_latency", 10**400, "e2e_seconds"),  # JSON's whole numbers know no end
        ("e2e_latency", 1e300, "e2e_seconds"),
        ("request_received_ts", 10**400, "received_unix_seconds"),
        ("prompt_tokens", -5, "prompt_tokens"),
        ("prompt_tokens", 1.5, "prompt_tokens"),
        ("completion_tokens", 10**12, "output_tokens"),
        ("cached_tokens", [CANARY], "cached_tokens"),
        ("num_retractions", {"text": CANARY}, "preemptions"),
        ("dp_rank", "zero", "rank"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_the_rest_kept(
    field: str, value: object, attribute: str
) -> None:
    found = read_line(line(**{field: value}))
    assert found.record is not None
    assert [r.name for r in found.refused] == [field]
    assert "CANARY" not in repr(found)
    assert getattr(found.record, attribute) is None
    assert found.record.request_id == "r1"


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b'{"id": "r"', "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b"{}", "id: missing"),
        (b'{"id": 7}', "id: missing"),
        (b'{"id": "r", "finish_reason": {"type": "vanished"}}', "finish_reason.type"),
        (b'{"id": "r", "request_parameters": "{CANARY"}', "request_parameters: no JSON object"),
        (line(request_parameters="[1]"), "request_parameters: no JSON object"),
    ],
)
def test_a_line_that_is_no_record_is_refused_without_being_quoted(garbage: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_line(garbage)
    assert "CANARY" not in str(caught.value)
    assert caught.value.__cause__ is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**400), 10**309]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NAMES = st.sampled_from([*json.loads(line()), "total_retractions", "decode_finished_ts"])


@given(st.dictionaries(NAMES, JSON), st.dictionaries(st.sampled_from(
    ["stream", "sampling_params", "custom_labels", "lora_path", "text"]), JSON))  # fmt: skip
def test_any_value_anywhere_gives_a_record_or_a_named_refusal(
    fields: dict[str, Any], parameters: dict[str, Any]
) -> None:
    try:
        found: RequestLine = read_line(line(parameters, **fields))
    except ValueError as error:
        named = str(error).split(":")[0]
        if named not in ("id", "finish_reason.type", "request_parameters"):
            raise
        return
    if found.record is not None:
        found.record.refuse_impossible(now=RECEIVED + 1e6)
        for name in ("queue_seconds", "time_to_first_token_seconds", "e2e_seconds"):
            value = getattr(found.record, name)
            assert value is None or (math.isfinite(value) and 0 <= value <= 86_400)

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from typing import Any

import pytest

from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.sidecar.wire.exchange import Direction, Exchange
from servoscope.sidecar.wire.limits import Budget
from sidecar.wire.talk import (
    CHAT,
    DONE,
    END,
    SMALL,
    chunk,
    delta,
    event,
    exchange,
    feed,
    request,
    stream_head,
    usage,
    whole,
)

REQUEST = request()
ROLE = chunk(event(delta(role="assistant", content="")))
LENGTH = chunk(event(delta(finish="length")))
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


def tokens(*texts: str) -> bytes:
    return b"".join(chunk(event(delta(content=text))) for text in texts)


def only(records: list[RequestRecord]) -> RequestRecord:
    assert len(records) == 1
    return records[0]


def streamed(target: Exchange, at: float = 0.0) -> list[RequestRecord]:
    """A request of 3 tokens at 3, 4 and 6 s, ended at 7 s."""
    return feed(
        target,
        [
            (at + 1, "c", REQUEST),
            (at + 2, "s", stream_head() + ROLE),
            (at + 3, "s", tokens("a")),
            (at + 4, "s", tokens("b")),
            (at + 6, "s", LENGTH),
            (at + 7, "s", chunk(event(usage(9, 3, 8))) + DONE + END),
        ],
    )


# ---- numbers ------------------------------------------------------------------------------------


def test_streamed_request_has_all_intervals() -> None:
    subject = exchange()
    record = only(streamed(subject))
    assert record.source is Source.TAP
    assert (record.outcome, record.phase, record.finish_reason) == (
        Outcome.LENGTH,
        Phase.DECODE,
        "length",
    )
    assert (record.status_code, record.streaming, record.endpoint) == (200, True, CHAT)
    assert (record.request_id, record.model_name, record.server) == (
        "chatcmpl-1",
        "m",
        "127.0.0.1:8000",
    )
    assert (record.received_unix_seconds, record.first_token_unix_seconds) == (1, 3)
    assert record.finished_unix_seconds == 7
    assert (record.time_to_first_token_seconds, record.e2e_seconds) == (2, 6)
    assert record.time_per_output_token_seconds == pytest.approx((6 - 3) / 2)
    assert (record.decode_seconds, record.inter_token_seconds) == (3, (1.0,))
    counts = (record.prompt_tokens, record.output_tokens, record.cached_tokens)
    assert counts == (9, 3, 8)
    assert (record.queue_seconds, record.prefill_seconds) == (None, None)
    assert not subject.drops
    assert subject.open_requests() == []


def test_received_is_the_last_byte_of_the_request() -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST[:20]), (2, "c", REQUEST[20:-3]), (5, "c", REQUEST[-3:])])
    assert subject.open_requests()[0].received_unix_seconds == 5


def test_without_usage_the_output_tokens_are_unknown_not_the_events() -> None:
    subject = exchange()
    steps = [(1.0, "c", REQUEST), (2.0, "s", stream_head() + tokens("a", "b", "c") + LENGTH)]
    record = only(feed(subject, [*steps, (3.0, "s", DONE + END)]))
    assert (record.output_tokens, record.time_per_output_token_seconds) == (None, None)
    assert record.outcome is Outcome.LENGTH


def test_one_output_token_has_no_tpot() -> None:
    subject = exchange()
    body = stream_head() + tokens("a") + LENGTH + chunk(event(usage(3, 1))) + DONE + END
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", body)]))
    assert record.time_to_first_token_seconds == 1
    assert record.time_per_output_token_seconds is None


def test_only_token_hidden_in_the_finish_event() -> None:
    subject = exchange()
    last = chunk(event(delta(content="", finish="length")))
    steps = [
        (1.0, "c", REQUEST),
        (2.0, "s", stream_head() + ROLE),
        (4.0, "s", last),
        (5.0, "s", chunk(event(usage(3, 1))) + DONE + END),
    ]
    assert only(feed(subject, steps)).time_to_first_token_seconds == 3


def test_two_choices_have_no_tpot() -> None:
    subject = exchange()
    body = b"".join(
        chunk(event(e))
        for e in (
            delta(0, content="a"),
            delta(1, content="a"),
            delta(0, content="b"),
            delta(1, content="b"),
            delta(0, finish="stop"),
            delta(1, finish="length"),
            usage(3, 4),
        )
    )
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + body + DONE + END)]))
    assert (record.output_tokens, record.time_per_output_token_seconds) == (4, None)
    assert record.outcome is Outcome.LENGTH


def test_not_streamed_has_e2e_and_tokens_but_no_ttft() -> None:
    subject = exchange()
    body = {
        "id": "cmpl-1",
        "model": "m",
        "choices": [{"index": 0, "text": "abc", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    }
    ask = request({"prompt": "x", "model": "asked", "max_tokens": 5}, "/v1/completions")
    record = only(feed(subject, [(1, "c", ask), (3, "s", whole(body))]))
    assert (record.outcome, record.streaming, record.e2e_seconds) == (Outcome.COMPLETED, False, 2)
    assert record.time_to_first_token_seconds is None
    assert record.time_per_output_token_seconds is None
    assert (record.prompt_tokens, record.output_tokens, record.max_output_tokens) == (4, 2, 5)
    assert record.phase is Phase.DECODE


def test_llamacpp_timings_give_queue_prefill_and_tpot() -> None:
    subject = exchange()
    timings = {
        "cache_n": 3, "prompt_n": 6, "prompt_ms": 1500, "predicted_n": 5, "predicted_ms": 2000
    }  # fmt: skip
    body = {
        "content": "x", "stop": True, "stop_type": "eos", "tokens_predicted": 5,
        "tokens_evaluated": 9, "timings": timings,
    }  # fmt: skip
    ask = request({"prompt": "x"}, "/completion")
    record = only(feed(subject, [(1, "c", ask), (6, "s", whole(body))]))
    assert (record.outcome, record.prompt_tokens, record.cached_tokens) == (
        Outcome.COMPLETED,
        9,
        3,
    )
    assert record.queue_seconds == pytest.approx(1.5)
    assert record.prefill_seconds == 1.5
    assert record.time_per_output_token_seconds == pytest.approx(0.5)
    assert record.request_id == "c-1"


@pytest.mark.parametrize("told", [1e6, 5_200])
def test_llamacpp_timings_longer_than_the_request_are_not_believed(told: float) -> None:
    subject = exchange()
    timings = {"cache_n": 3, "prompt_n": 6, "prompt_ms": told, "predicted_n": 5, "predicted_ms": 9}
    body = {"content": "x", "stop": True, "tokens_predicted": 5, "timings": timings}
    ask = request({"prompt": "x"}, "/completion")
    record = only(feed(subject, [(1, "c", ask), (6, "s", whole(body))]))
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (None,) * 3
    assert record.time_per_output_token_seconds is None
    assert (record.e2e_seconds, record.prompt_tokens, record.output_tokens) == (5, 9, 5)
    assert subject.drops == {"timings": 1}


def test_llamacpp_answers_a_list_of_prompts_with_a_list() -> None:
    subject = exchange()
    body = [
        {"index": n, "content": "x", "stop": True, "stop_type": "limit", "tokens_predicted": 3,
         "tokens_evaluated": 4 + n, "timings": {"cache_n": n, "prompt_n": 4, "predicted_n": 3,
                                                "prompt_ms": 1, "predicted_ms": 1}}
        for n in range(2)
    ]  # fmt: skip
    ask = request({"prompt": ["a", "b"]}, "/completion")
    record = only(feed(subject, [(1, "c", ask), (6, "s", whole(body))]))
    assert (record.outcome, record.output_tokens) == (Outcome.LENGTH, 6)
    assert (record.prompt_tokens, record.cached_tokens) == (None, None)  # told for one of them
    assert (record.queue_seconds, record.time_per_output_token_seconds) == (None, None)
    assert subject.drops == {}


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("a", 5), ([7, 8], 5), (["a", "b"], None), ([[7], [8]], None), ([], 5)]
)
def test_llamacpp_usage_is_of_one_prompt(prompt: Any, tokens: int | None) -> None:
    subject = exchange()
    body = {
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "timings": {"predicted_n": 2, "cache_n": 1, "prompt_n": 4},
    }
    ask = request({"prompt": prompt}, "/v1/completions")
    record = only(feed(subject, [(1, "c", ask), (6, "s", whole(body))]))
    assert record.prompt_tokens == tokens
    del body["timings"]  # another engine, whose usage is of all prompts
    record = only(feed(exchange(), [(1, "c", ask), (6, "s", whole(body))]))
    assert record.prompt_tokens == 5


def test_progress_shows_the_prefill_phase() -> None:
    subject = exchange()
    progress = {"choices": [], "prompt_progress": {"total": 9, "processed": 3}}
    feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + ROLE)])
    assert subject.open_requests()[0].phase is Phase.UNKNOWN
    subject.server_bytes(chunk(event(progress)), 3)
    assert subject.open_requests()[0].phase is Phase.PREFILL
    subject.server_bytes(tokens("a"), 4)
    assert subject.open_requests()[0].phase is Phase.DECODE


# ---- what is a request --------------------------------------------------------------------------


def test_other_requests_are_no_records_but_keep_the_order() -> None:
    subject = exchange()
    steps = [(1.0, "c", GET + REQUEST + GET), (2.0, "s", whole(b"{}"))]
    assert feed(subject, steps) == []
    body = stream_head() + tokens("a") + LENGTH + DONE + END
    assert only(feed(subject, [(3, "s", body + whole(b"{}"))])).outcome is Outcome.LENGTH
    assert not subject.drops


def test_pipelined_requests_are_answered_in_order() -> None:
    subject = exchange()
    asks = [request({"model": f"m{n}"}, "/v1/completions") for n in range(3)]
    feed(subject, [(float(n), "c", ask) for n, ask in enumerate(asks)])
    assert [r.model_name for r in subject.open_requests()] == ["m0", "m1", "m2"]
    answers = [whole({"id": f"r{n}", "choices": [{"finish_reason": "stop"}]}) for n in range(3)]
    records = feed(subject, [(10, "s", b"".join(answers))])
    assert [(r.request_id, r.model_name, r.e2e_seconds) for r in records] == [
        ("r0", "m0", 10),
        ("r1", "m1", 9),
        ("r2", "m2", 8),
    ]


def test_keep_alive_connection_serves_many() -> None:
    subject = exchange()
    records = [record for n in range(5) for record in streamed(subject, at=10.0 * n)]
    assert [r.received_unix_seconds for r in records] == [1, 11, 21, 31, 41]
    assert {r.e2e_seconds for r in records} == {6}


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_responses_without_body_keep_the_order(status: str) -> None:
    subject = exchange()
    empty = f"HTTP/1.1 {status}\r\nContent-Length: 10\r\n\r\n".encode()
    assert feed(subject, [(1, "c", GET + REQUEST), (2, "s", empty)]) == []
    assert only(feed(subject, [(3, "s", whole(b"{}"))])).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("step", [1, 1000])
def test_response_to_head_has_no_body(step: int) -> None:
    subject = exchange()
    ask = GET.replace(b"GET", b"HEAD")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    both = answer + whole(b"{}") + answer + whole(b'{"choices":[{"finish_reason":"stop"}]}')
    subject.client_bytes(ask + GET + ask + REQUEST, 1)
    records: list[RequestRecord] = []
    for at in range(0, len(both), step):
        records += subject.server_bytes(both[at : at + step], 2)
    assert only(records).outcome is Outcome.COMPLETED
    assert not subject.drops


def test_100_continue_is_not_the_response() -> None:
    subject = exchange()
    head, body = REQUEST[:-15], REQUEST[-15:]
    steps = [
        (1.0, "c", head.replace(b"Host", b"Expect: 100-continue\r\nHost")),
        (2.0, "s", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (3.0, "c", body),
        (4.0, "s", whole(b'{"choices":[{"finish_reason":"stop"}]}')),
    ]
    record = only(feed(subject, steps))
    assert (record.received_unix_seconds, record.e2e_seconds) == (3, 1)


def test_chunked_request_body() -> None:
    subject = exchange()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = chunk(b'{"stream":true,') + chunk(b'"model":"q"}') + END
    feed(subject, [(1, "c", head), (2, "c", body)])
    open_ = subject.open_requests()[0]
    assert (open_.model_name, open_.received_unix_seconds) == ("q", 2)


def test_h2c_upgrade_that_the_server_ignores() -> None:
    subject = exchange()
    headers = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    ask = request({"stream": True, "model": "q"}, headers=headers)
    feed(subject, [(1, "c", ask[:-5]), (2, "c", ask[-5:] + GET)])
    assert subject.open_requests()[0].model_name == "q"
    answers = whole(b'{"choices":[{"finish_reason":"stop"}]}') + whole(b"{}")
    assert only(feed(subject, [(3, "s", answers)])).e2e_seconds == 1
    assert only(streamed(subject, 10)).e2e_seconds == 6


def test_accepted_upgrade_stops_looking() -> None:
    subject = exchange()
    ask = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    yes = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    feed(subject, [(1, "c", ask), (2, "s", yes + b"\x81\x05hello"), (3, "c", b"\x81\x85xxxx")])
    assert streamed(subject) == []
    assert subject.drops == {"upgraded": 1}


@pytest.mark.parametrize(
    ("first", "reason"),
    [(b"\x16\x03\x01\x02\x00\x01", "tls"), (b"PRI * HTTP/2.0\r\n\r\n", "http2")],
)
def test_other_protocols_are_named(first: bytes, reason: str) -> None:
    subject = exchange()
    assert feed(subject, [(1, "c", first), (2, "s", first), (3, "c", REQUEST)]) == []
    assert subject.drops == {reason: 1}


# ---- headers ------------------------------------------------------------------------------------


def test_only_the_allow_list_of_headers_is_kept_bounded() -> None:
    subject = exchange()
    headers = (
        "Authorization: Bearer secret\r\nX-Request-Type:  rag \r\nX-Tenant: acme\r\n"
        f"X-Request-Id: {'i' * 500}\r\nCookie: secret\r\n"
    )
    ask = request(headers=headers)
    record = only(feed(subject, [(1, "c", ask), (2, "s", whole(b"{}", status="429 Too Many"))]))
    assert (record.request_type_hint, record.tenant) == ("rag", "acme")
    assert record.request_id == "i" * 128
    assert "secret" not in repr(record)


def test_control_characters_of_a_header_are_replaced() -> None:
    subject = exchange()
    ask = request(headers="X-Tenant: a\tb\xff\r\n")
    record = only(feed(subject, [(1, "c", ask), (2, "s", whole(b"{}", status="503 Busy"))]))
    assert record.tenant.isprintable()


# ---- outcomes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "outcome", "phase"),
    [
        ("429 Too Many Requests", Outcome.REJECTED, Phase.QUEUED),
        ("503 Service Unavailable", Outcome.REJECTED, Phase.QUEUED),
        ("400 Bad Request", Outcome.CLIENT_ERROR, Phase.UNKNOWN),
        ("404 Not Found", Outcome.CLIENT_ERROR, Phase.UNKNOWN),
        ("307 Temporary Redirect", Outcome.CLIENT_ERROR, Phase.UNKNOWN),
        ("408 Request Timeout", Outcome.TIMEOUT, Phase.UNKNOWN),
        ("504 Gateway Timeout", Outcome.TIMEOUT, Phase.UNKNOWN),
        ("500 Internal Server Error", Outcome.ERROR, Phase.UNKNOWN),
        ("502 Bad Gateway", Outcome.ERROR, Phase.UNKNOWN),
    ],
)
def test_status_decides(status: str, outcome: Outcome, phase: Phase) -> None:
    subject = exchange()
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", whole(b'{"error":1}', "", status))]))
    assert (record.outcome, record.phase) == (outcome, phase)
    assert record.status_code == int(status[:3])
    assert (record.streaming, record.e2e_seconds) == (True, 1)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("stop", Outcome.COMPLETED),
        ("tool_calls", Outcome.COMPLETED),
        ("length", Outcome.LENGTH),
        ("abort", Outcome.CANCELLED),
        ("error", Outcome.ERROR),
    ],
)
def test_finish_reason_decides_a_200(reason: str, outcome: Outcome) -> None:
    subject = exchange()
    body = stream_head() + tokens("a") + chunk(event(delta(finish=reason))) + DONE + END
    assert only(feed(subject, [(1, "c", REQUEST), (2, "s", body)])).outcome is outcome


@pytest.mark.parametrize(
    "bad",
    [
        event({"error": {"message": "boom"}}),
        b"event: error\ndata: boom\n\n",
        b'error: {"message":"boom"}\n\n',
    ],
)
def test_error_inside_a_200_stream(bad: bytes) -> None:
    subject = exchange()
    body = stream_head() + tokens("a") + chunk(bad) + DONE + END
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", body)]))
    assert (record.outcome, record.status_code) == (Outcome.ERROR, 200)
    assert record.phase is Phase.DECODE


def test_stream_that_ends_without_any_ending_is_an_error() -> None:
    subject = exchange()
    body = stream_head() + tokens("a", "b") + END
    assert only(feed(subject, [(1, "c", REQUEST), (2, "s", body)])).outcome is Outcome.ERROR


def test_malformed_answer_with_200_is_an_error() -> None:
    subject = exchange()
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", whole(b"{not json"))]))
    assert record.outcome is Outcome.ERROR
    assert subject.drops == {"malformed_body": 1}


def test_server_that_breaks_off_is_an_error() -> None:
    for reset in (False, True):
        subject = exchange()
        feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + tokens("a"))])
        record = only(subject.server_closed(5, reset=reset))
        assert (record.outcome, record.phase) == (Outcome.ERROR, Phase.DECODE)
        assert (record.e2e_seconds, record.time_to_first_token_seconds) == (4, 1)


def test_server_that_never_answers_is_an_error() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    record = only(subject.server_closed(5))
    assert (record.outcome, record.status_code, record.phase) == (
        Outcome.ERROR,
        None,
        Phase.UNKNOWN,
    )


def test_response_until_close_is_complete_at_the_close() -> None:
    subject = exchange()
    head = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"
    body = b'{"choices":[{"finish_reason":"stop"}]}'
    feed(subject, [(1, "c", REQUEST), (2, "s", head + body)])
    record = only(subject.server_closed(3))
    assert (record.outcome, record.e2e_seconds) == (Outcome.COMPLETED, 2)


def test_client_that_resets_before_the_first_token() -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + ROLE)])
    record = only(subject.client_closed(4, reset=True))
    assert (record.outcome, record.phase) == (Outcome.CLIENT_DISCONNECT, Phase.UNKNOWN)
    assert (record.e2e_seconds, record.time_to_first_token_seconds) == (3, None)
    assert subject.server_bytes(tokens("a"), 5) == []


def test_client_that_closes_while_tokens_come() -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + tokens("a"))])
    assert subject.client_closed(4) == []  # it may still be reading
    subject.server_bytes(tokens("b"), 5)
    record = only(subject.server_closed(6))
    assert (record.outcome, record.phase) == (Outcome.CLIENT_DISCONNECT, Phase.DECODE)
    assert (record.finished_unix_seconds, record.time_to_first_token_seconds) == (4, 1)


def test_a_request_that_is_seen_after_its_clients_close_ends_no_earlier_than_it_began() -> None:
    subject = exchange()
    assert subject.client_closed(1) == []
    assert subject.client_bytes(REQUEST, 2) == []  # out of order
    record = only(subject.server_closed(3))
    assert record.outcome is Outcome.CLIENT_DISCONNECT
    assert (record.received_unix_seconds, record.finished_unix_seconds) == (2, 2)
    assert record.refuse_impossible(now=10.0) == []


def test_client_that_half_closes_and_reads_on() -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST)])
    assert subject.client_closed(2) == []
    body = stream_head() + tokens("a") + LENGTH + DONE + END
    record = only(feed(subject, [(3, "s", body)]))
    assert (record.outcome, record.e2e_seconds) == (Outcome.LENGTH, 2)


@pytest.mark.parametrize("rest", [whole(b""), stream_head() + tokens("a") + END])
def test_answer_cut_short_for_a_client_that_left(rest: bytes) -> None:
    """llama.cpp ends the response in good order when it sees the client go."""
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    subject.client_closed(2)
    record = only(subject.server_bytes(rest, 3))
    assert (record.outcome, record.finished_unix_seconds) == (Outcome.CLIENT_DISCONNECT, 2)
    assert not subject.drops


def test_first_token_sent_after_the_client_left_does_not_count() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    subject.client_closed(2)
    subject.server_bytes(stream_head() + tokens("a"), 3)
    record = only(subject.client_closed(4, reset=True))
    assert record.first_token_unix_seconds is None
    assert record.time_to_first_token_seconds is None


def test_client_that_leaves_between_done_and_the_last_chunk_is_complete() -> None:
    subject = exchange()
    body = stream_head() + tokens("a") + LENGTH + chunk(event(usage(3, 2))) + DONE
    feed(subject, [(1, "c", REQUEST), (2, "s", body)])
    record = only(subject.client_closed(9, reset=True))
    assert (record.outcome, record.e2e_seconds, record.output_tokens) == (Outcome.LENGTH, 1, 2)


def test_client_that_leaves_while_it_sends() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST[:-2], 1)
    record = only(subject.client_closed(2))
    assert (record.outcome, record.received_unix_seconds) == (Outcome.CLIENT_DISCONNECT, None)
    assert record.e2e_seconds is None


def test_early_refusal_while_the_client_still_sends() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST[:-2], 1)
    record = only(subject.server_bytes(whole(b"{}", status="413 Too Large"), 2))
    assert (record.outcome, record.e2e_seconds) == (Outcome.CLIENT_ERROR, None)
    assert subject.client_bytes(REQUEST[-2:], 3) == []
    assert only(streamed(subject, 10)).e2e_seconds == 6


def test_connection_that_closes_idle_gives_nothing() -> None:
    subject = exchange()
    streamed(subject)
    assert subject.server_closed(100) == []
    assert subject.client_closed(101) == []
    assert not subject.drops


# ---- losing and finding -------------------------------------------------------------------------


@pytest.mark.parametrize("direction", list(Direction))
def test_gap_ends_open_requests_as_unknown_and_finds_the_next(direction: Direction) -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + tokens("a"))])
    record = only(subject.gap(direction, 3))
    assert (record.outcome, record.e2e_seconds) == (Outcome.UNKNOWN, None)
    assert (record.time_to_first_token_seconds, record.finished_unix_seconds) == (1, None)
    assert subject.server_bytes(tokens("b") + LENGTH + DONE + END, 4) == []
    assert subject.drops == {f"gap_{direction}": 1}
    assert only(streamed(subject, 10)).e2e_seconds == 6


def test_gap_after_the_last_event_of_a_stream_keeps_its_outcome() -> None:
    subject = exchange()
    body = stream_head() + tokens("a") + LENGTH + DONE
    feed(subject, [(1, "c", REQUEST), (2, "s", body)])
    record = only(subject.gap(Direction.SERVER, 9))
    assert (record.outcome, record.e2e_seconds) == (Outcome.LENGTH, 1)


def test_joined_in_the_middle_waits_for_the_next_request() -> None:
    subject = exchange(synced=False)
    steps = [
        (1.0, "s", tokens("a") + LENGTH),
        (2.0, "c", b"rest of a body"),
        (3.0, "s", DONE + END),
    ]
    assert feed(subject, steps) == []
    assert only(streamed(subject, 10)).time_to_first_token_seconds == 2
    assert not subject.drops


def test_late_bytes_of_an_older_response_are_not_taken_for_the_next() -> None:
    subject = exchange(synced=False)
    subject.client_bytes(REQUEST, 1)
    assert subject.server_bytes(tokens("old") + LENGTH + DONE + END, 2) == []
    record = only(feed(subject, [(3, "s", whole(b'{"choices":[{"finish_reason":"stop"}]}'))]))
    assert record.e2e_seconds == 2


def test_garbage_from_the_client_ends_what_is_open_as_unknown() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    record = only(subject.client_bytes(b"\x00\x01garbage\r\n\r\n", 2))
    assert (record.outcome, subject.drops) == (Outcome.UNKNOWN, {"malformed_http": 1})
    assert only(streamed(subject, 10)).e2e_seconds == 6


def test_garbage_from_the_server() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    record = only(subject.server_bytes(b"HTTP/1.1 abc\r\n\r\n", 2))
    assert (record.outcome, subject.drops) == (Outcome.UNKNOWN, {"malformed_http": 1})


def test_response_without_a_request_is_counted() -> None:
    subject = exchange()
    assert subject.server_bytes(whole(b"{}", status="408 Request Timeout"), 2) == []
    assert subject.drops == {"response_without_request": 1}


def test_connection_lost_too_often_is_left_alone() -> None:
    subject = exchange(limits=SMALL)
    for n in range(SMALL.resyncs + 3):
        subject.client_bytes(REQUEST, n)
        subject.gap(Direction.CLIENT, n)
    assert streamed(subject) == []
    assert subject.drops["gap_client"] == SMALL.resyncs + 1


def test_abandoned_connection_ends_its_requests_as_unknown() -> None:
    subject = exchange()
    subject.client_bytes(REQUEST, 1)
    assert only(subject.abandoned(5)).outcome is Outcome.UNKNOWN
    assert streamed(subject) == []


def test_clock_step_does_not_show_in_intervals() -> None:
    subject = exchange()
    feed(subject, [(1, "c", REQUEST), (2, "s", stream_head() + tokens("a"))])
    subject.shift_clock(3600)
    body = tokens("b") + LENGTH + chunk(event(usage(3, 3))) + DONE + END
    record = only(feed(subject, [(3604, "s", body)]))
    assert (record.time_to_first_token_seconds, record.e2e_seconds) == (1, 3)
    assert record.time_per_output_token_seconds == 1
    assert record.received_unix_seconds == 3601


# ---- bounds -------------------------------------------------------------------------------------


def test_request_body_beyond_its_bound_leaves_streaming_to_the_response() -> None:
    subject = exchange(limits=SMALL)
    ask = request({"stream": True, "model": "q", "prompt": "x" * 2000})
    body = stream_head() + tokens("a") + LENGTH + DONE + END
    record = only(feed(subject, [(1, "c", ask), (2, "s", body)]))
    assert (record.streaming, record.outcome) == (True, Outcome.LENGTH)
    assert subject.drops == {"request_body": 1}


def test_answer_beyond_its_bound_is_complete_with_unknown_tokens() -> None:
    subject = exchange(limits=SMALL)
    body = {"choices": [{"text": "x" * 2000, "finish_reason": "stop"}], "usage": {}}
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", whole(body))]))
    assert (record.outcome, record.output_tokens) == (Outcome.COMPLETED, None)
    assert subject.drops == {"response_body": 1}


def test_event_beyond_its_bound_is_not_an_error_of_the_engine() -> None:
    subject = exchange(limits=SMALL)
    big = event(delta(content="x" * 2000, finish="stop"))
    parts = [big[at : at + 300] for at in range(0, len(big), 300)]
    steps = [(1.0, "c", REQUEST), (2.0, "s", stream_head() + tokens("a"))]
    steps += [(3.0, "s", chunk(part)) for part in parts]
    record = only(feed(subject, [*steps, (4.0, "s", END)]))
    assert record.outcome is Outcome.COMPLETED
    assert subject.drops == {"event_size": 1}


@pytest.mark.parametrize(
    "flood",
    [b"a", b"A: b\r\n", b"\r\n"],
)
def test_endless_head_is_given_up(flood: bytes) -> None:
    budget = Budget()
    subject = exchange(limits=SMALL, budget=budget)
    subject.client_bytes(b"GET / HTTP/1.1\r\nX: " if flood == b"a" else b"", 1)
    if flood == b"A: b\r\n":
        subject.client_bytes(b"GET / HTTP/1.1\r\n", 1)
    for _ in range(200):
        subject.client_bytes(flood * 20, 2)
    assert subject.drops == {"endless_head": 1}


def test_long_target_is_given_up() -> None:
    subject = exchange(limits=SMALL)
    subject.client_bytes(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n", 1)
    assert subject.drops == {"long_target": 1}


def test_pipelining_is_bounded() -> None:
    subject = exchange(limits=SMALL)
    records = subject.client_bytes(REQUEST * 10, 1)
    assert [r.outcome for r in records] == [Outcome.UNKNOWN] * SMALL.open_calls
    assert subject.drops == {"open_requests": 1}


def test_memory_is_given_back() -> None:
    budget = Budget()
    subject = exchange(budget=budget)
    subject.client_bytes(request({"prompt": "x" * 500})[:-20], 1)
    assert budget.used > 400
    subject.client_closed(2)
    other = exchange(budget=budget)
    other.client_bytes(REQUEST, 1)
    other.server_bytes(stream_head() + chunk(b"data: half an event"), 2)
    assert budget.used == 19
    other.gap(Direction.SERVER, 3)
    streamed(exchange(budget=budget))
    assert budget.used == 0


def test_drops_are_shared_between_connections() -> None:
    drops: Counter[str] = Counter()
    for _ in range(3):
        exchange(drops=drops).client_bytes(b"\x16\x03\x01", 1)
    assert drops == {"tls": 3}


# ---- codings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_stream_keeps_the_times_of_its_events(coding: str) -> None:
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)

    def packed(data: bytes, flush: int = zlib.Z_SYNC_FLUSH) -> bytes:
        return chunk(packer.compress(data) + packer.flush(flush))

    subject = exchange()
    steps = [
        (1.0, "c", REQUEST),
        (2.0, "s", stream_head(f"Content-Encoding: {coding}\r\n")),
        (3.0, "s", packed(event(delta(content="a")))),
        (5.0, "s", packed(event(delta(finish="stop")) + event(usage(3, 2)))),
        (6.0, "s", packed(event("[DONE]"), zlib.Z_FINISH) + END),
    ]
    record = only(feed(subject, steps))
    assert (record.outcome, record.output_tokens) == (Outcome.COMPLETED, 2)
    assert (record.time_to_first_token_seconds, record.decode_seconds) == (2, 2)


def test_compressed_whole_answer_and_request() -> None:
    ask = gzip.compress(json.dumps({"model": "q", "stream": False}).encode())
    answer: dict[str, Any] = {"choices": [{"finish_reason": "length"}], "usage": {}}
    answer["usage"]["completion_tokens"] = 7
    subject = exchange()
    record = only(
        feed(
            subject,
            [
                (1, "c", request(ask, headers="Content-Encoding: gzip\r\n")),
                (
                    2,
                    "s",
                    whole(gzip.compress(json.dumps(answer).encode()), "Content-Encoding: gzip\r\n"),
                ),
            ],
        )
    )
    assert (record.outcome, record.output_tokens, record.model_name) == (Outcome.LENGTH, 7, "q")


@pytest.mark.parametrize(
    ("coding", "data"), [("br", b"whatever"), ("gzip", b"not gzip at all"), ("gzip", b"")]
)
def test_unreadable_coding_is_complete_with_unknown_tokens(coding: str, data: bytes) -> None:
    subject = exchange()
    answer = stream_head(f"Content-Encoding: {coding}\r\n") + (chunk(data) if data else b"") + END
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", answer)]))
    assert record.output_tokens is None
    assert record.time_to_first_token_seconds is None
    assert record.outcome is (Outcome.COMPLETED if data else Outcome.ERROR)
    assert subject.drops["response_coding"] == (1 if data else 0)


def test_decompression_bomb_is_stopped() -> None:
    subject = exchange(limits=SMALL)
    bomb = whole(gzip.compress(bytes(1_000_000)), "Content-Encoding: gzip\r\n")
    record = only(feed(subject, [(1, "c", REQUEST), (2, "s", bomb)]))
    assert (record.outcome, record.output_tokens) == (Outcome.COMPLETED, None)


def test_embeddings_have_tokens_and_e2e_only() -> None:
    subject = exchange()
    body = {"data": [{"embedding": [0.1] * 8}], "usage": {"prompt_tokens": 5}, "model": "m"}
    ask = request({"input": "x"}, "/v1/embeddings")
    record = only(feed(subject, [(1, "c", ask), (2, "s", whole(body))]))
    assert (record.outcome, record.prompt_tokens, record.e2e_seconds) == (Outcome.COMPLETED, 5, 1)
    assert record.time_to_first_token_seconds is None


def test_json_under_curls_content_type_is_read() -> None:
    subject = exchange()
    headers = "Content-Type: application/x-www-form-urlencoded\r\n"
    subject.client_bytes(request({"model": "q"}, "/completion", headers), 1)
    assert subject.open_requests()[0].model_name == "q"


def test_multipart_request_body_is_not_held() -> None:
    budget = Budget()
    subject = exchange(budget=budget)
    headers = "Content-Type: multipart/form-data; boundary=x\r\n"
    ask = request(b"x" * 5000, "/v1/audio/transcriptions", headers)
    subject.client_bytes(ask[:-10], 1)
    assert budget.used == 0
    record = only(feed(subject, [(2, "c", ask[-10:]), (3, "s", whole(b'{"text":"a"}'))]))
    assert (record.outcome, record.streaming) == (Outcome.COMPLETED, False)

"""Requests from spans: captured ones agree with the request file; what is missing is unknown."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.otlp_bytes import captured_spans, encode
from servoscope.exporters.otlp import Span, read_spans
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.sglang.requests import read_line
from servoscope.exporters.sglang.spans import ATTRIBUTES, SCOPE, Assembler, wanted

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "sglang" / "0.5.23"
S = 1_000_000_000


def captured() -> list[Span]:
    return read_spans(encode(captured_spans()), scope=SCOPE, wanted=wanted, attributes=ATTRIBUTES)


def root(ident: str = "r", /, **more: Any) -> Span:
    told: dict[str, Any] = {
        "rid": f"rid-{ident}", "gen_ai.usage.prompt_tokens": 60,
        "gen_ai.usage.completion_tokens": 24, "gen_ai.usage.cached_tokens": 0,
        "gen_ai.response.finish_reasons": '["length"]', "gen_ai.latency.e2e": 0.2,
        "gen_ai.latency.time_to_first_token": 0.03,
        "gen_ai.latency.time_in_model_decode": 0.17, "gen_ai.response.model": "model",
    } | more  # fmt: skip
    told = {k: v for k, v in told.items() if v is not None}
    return Span("t", ident, "client", f" Req {ident}", S, S + S // 5, told)


def thread(root_id: str = "r", /, tp: int = 0, **more: Any) -> Span:
    told = {"tp_rank": tp} | {k: v for k, v in more.items() if k != "failed"}
    return Span(
        "t", f"{root_id}-s{tp}", root_id, f"Scheduler [TP {tp}]  [PP 0] (host:h | pid:1)", S,
        S + S // 6, told, bool(more.get("failed")),
    )  # fmt: skip


def stage(name: str, seconds: float, root_id: str = "r", tp: int = 0) -> Span:
    end = S + round(seconds * S)
    return Span("t", f"{root_id}-{name}{tp}", f"{root_id}-s{tp}", name, S, end)


def whole(root_id: str = "r", /, **more: Any) -> list[Span]:
    return [
        stage("prefill_waiting", 0.004, root_id), stage("prefill_forward", 0.02, root_id),
        thread(root_id), root(root_id, **more),
    ]  # fmt: skip


def only(records: list[RequestRecord]) -> RequestRecord:
    assert len(records) == 1
    return records[0]


def test_the_captured_requests_agree_with_the_request_file() -> None:
    found = {r.request_id: r for r in Assembler().take(captured(), 0.0)}
    lines = (FIXTURES / "request-metrics_traced.jsonl").read_text().splitlines()
    assert len(found) == len(lines) == 6
    for line in lines:
        told = read_line(line).record
        assert told is not None
        seen = found[told.request_id]
        assert (seen.source, seen.outcome, seen.phase) == (Source.OTLP, told.outcome, told.phase)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens", "max_output_tokens"):
            assert getattr(seen, name) == getattr(told, name), name
        for name in (
            "queue_seconds", "prefill_seconds", "decode_seconds", "e2e_seconds",
            "time_per_output_token_seconds", "received_unix_seconds", "finished_unix_seconds",
        ):  # fmt: skip
            assert getattr(seen, name) == pytest.approx(getattr(told, name), abs=1e-4), name
        raw = json.loads(line)["first_token_latency"]
        assert seen.time_to_first_token_seconds == pytest.approx(raw)
        assert seen.model_name == "model"
        assert seen.refuse_impossible(now=2e9) == []


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_spans_may_come_in_any_order_and_in_any_pieces(rng: random.Random, size: int) -> None:
    spans = captured()
    rng.shuffle(spans)
    assembler = Assembler()
    records: list[RequestRecord] = []
    for start in range(0, len(spans), size):
        records += assembler.take(spans[start : start + size], float(start) / 1e3)
    assert len({r.request_id for r in records}) == len(records) == 6
    assert all(r.queue_seconds is not None and r.prefill_seconds is not None for r in records)
    assert len(assembler) == 0
    assert assembler.expire(1e9) == []
    assert not assembler.drops


def test_spans_that_come_again_count_once() -> None:
    assembler = Assembler()
    assert len(assembler.take(captured(), 0.0)) == 6
    assert assembler.take(captured(), 1.0) == []
    assert assembler.expire(1e6) == []
    assert assembler.drops["duplicate_span"] > 0


def test_spans_of_tokens_are_not_wanted() -> None:
    names = {s["name"] for s in captured_spans()}
    assert "decode_loop" in names
    kept = {name for name in names if wanted(name)}
    assert {n.split("(")[0].split(" [")[0].rstrip() for n in kept} == {
        "prefill_waiting", "prefill_forward", "Scheduler",
        *(name for name in names if " Req " in name),
    }  # fmt: skip


def test_two_requests_of_one_trace_are_two() -> None:
    records = Assembler().take([*whole("a"), *whole("b")], 0.0)
    assert sorted(r.request_id for r in records) == ["rid-a", "rid-b"]


def test_the_queue_of_the_first_tensor_rank_counts() -> None:
    other = [stage("prefill_waiting", 9.0, tp=1), stage("prefill_forward", 9.0, tp=1), thread(tp=1)]
    assembler = Assembler()
    assert only(assembler.take([*other, *whole()], 0.0)).queue_seconds == pytest.approx(0.004)
    assert len(assembler) == 0


def test_a_root_whose_stages_do_not_come_is_told_without_them() -> None:
    assembler = Assembler()
    assert assembler.take([root()], 0.0) == []
    assert assembler.expire(4.9) == []
    record = only(assembler.expire(5.0))
    assert record.outcome is Outcome.LENGTH
    assert (record.queue_seconds, record.prefill_seconds) == (None, None)
    assert record.time_to_first_token_seconds == 0.03
    assert assembler.take([stage("prefill_waiting", 0.004), thread()], 6.0) == []
    assert assembler.expire(1e5) == []


def test_a_root_that_does_not_come_is_unknown_and_has_no_numbers() -> None:
    assembler = Assembler()
    assembler.take([stage("prefill_waiting", 0.004), thread(dp_rank=2)], 0.0)
    assert assembler.expire(59.0) == []
    record = only(assembler.expire(60.0))
    assert (record.outcome, record.request_id, record.rank) == (Outcome.UNKNOWN, "r", 2)
    assert record.e2e_seconds is record.queue_seconds is record.prompt_tokens is None
    assert assembler.take([root()], 61.0) == []


def test_the_request_that_is_sampled_n_times_is_counted_by_its_samples() -> None:
    """Its root ends without an answer, after a prefill that was its own (seen with n=2)."""
    bare = {
        "gen_ai.response.finish_reasons": None, "gen_ai.usage.completion_tokens": None,
        "gen_ai.latency.time_to_first_token": None, "gen_ai.latency.time_in_model_decode": None,
    }  # fmt: skip
    assembler = Assembler()
    assert assembler.take(whole(**bare), 0.0) == []
    assert len(assembler) == 0


def test_a_root_without_a_reason_or_a_schedulers_word_is_unknown() -> None:
    bare = {
        "gen_ai.response.finish_reasons": None, "gen_ai.usage.completion_tokens": None,
        "gen_ai.latency.time_to_first_token": None, "gen_ai.latency.time_in_model_decode": None,
    }  # fmt: skip
    assembler = Assembler()
    assembler.take([root(**bare)], 0.0)
    record = only(assembler.expire(5.0))
    assert (record.outcome, record.e2e_seconds) == (Outcome.UNKNOWN, None)


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ({"type": "abort", "status_code": 503, "message": "queue is full"}, Outcome.REJECTED),
        ({"type": "abort", "status_code": 400, "message": "too long"}, Outcome.CLIENT_ERROR),
        ({"reason": "Abort in waiting queue"}, Outcome.CANCELLED),
        ({"reason": "Request waiting timeout reached."}, Outcome.TIMEOUT),
    ],
)
def test_an_abort_is_told_by_the_schedulers_thread(told: dict[str, Any], outcome: Outcome) -> None:
    bare = dict.fromkeys(
        ("gen_ai.response.finish_reasons", "gen_ai.usage.completion_tokens",
         "gen_ai.latency.time_to_first_token", "gen_ai.latency.time_in_model_decode")
    )  # fmt: skip
    assembler = Assembler()
    assembler.take([thread(failed=True, **told), root(**bare)], 0.0)
    record = only(assembler.expire(5.0))
    assert record.outcome is outcome
    assert record.time_to_first_token_seconds is None
    assert "queue" not in repr(record.finish_reason)


def test_a_running_request_that_was_aborted_keeps_its_first_token() -> None:
    told = {"gen_ai.response.finish_reasons": '["abort"]', "gen_ai.usage.completion_tokens": 3}
    record = only(Assembler().take(whole(**told), 0.0))
    assert (record.outcome, record.phase) == (Outcome.CANCELLED, Phase.DECODE)
    assert record.time_to_first_token_seconds == 0.03


def test_the_warming_pass_of_parallel_sampling_is_no_request() -> None:
    told = {"gen_ai.usage.completion_tokens": 0, "gen_ai.request.n": 2}
    assembler = Assembler()
    assert assembler.take(whole(**told), 0.0) == []
    assert len(assembler) == 0


def test_one_token_has_no_pace() -> None:
    record = only(Assembler().take(whole(**{"gen_ai.usage.completion_tokens": 1}), 0.0))
    assert record.time_per_output_token_seconds is None
    assert record.time_to_first_token_seconds == 0.03


def test_tables_are_bounded_and_what_is_thrown_away_is_counted() -> None:
    assembler = Assembler(max_open=10)
    for n in range(1_000):
        assembler.take([stage("prefill_waiting", 0.1, f"{n}"), thread(f"other-{n}")], float(n))
    assert len(assembler) == 20
    assert assembler.drops["open_table_full"] == 1_980


def test_stages_whose_thread_never_ends_are_let_go() -> None:
    assembler = Assembler()
    assembler.take([stage("prefill_waiting", 0.1)], 0.0)
    assert assembler.expire(3_599.0) == []
    assert len(assembler) == 1
    assert assembler.expire(3_600.0) == []
    assert len(assembler) == 0
    assert assembler.drops == {"never_ended": 1}


VALUES = st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=5)


@given(st.dictionaries(st.sampled_from(sorted(ATTRIBUTES)), VALUES))
def test_any_attributes_give_a_record_that_is_possible(told: dict[str, Any]) -> None:
    assembler = Assembler()
    records = assembler.take(whole(**told), 0.0) + assembler.expire(100.0)
    assert len(records) <= 1
    for record in records:
        record.refuse_impossible(now=2e9)
        assert isinstance(record.outcome, Outcome)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.spec import Disconnects, Objective, Sli, parse_spec
from servoscope.alerts.verdict import (
    BAD,
    CENSORED,
    FAR_OVER,
    GOOD,
    LEFT_OUT,
    Verdict,
    meets_all,
    verdict,
)
from servoscope.exporters.records import Outcome, RequestRecord, Source

TTFT = Sli.TIME_TO_FIRST_TOKEN
TPOT = Sli.TIME_PER_OUTPUT_TOKEN
SLIS = tuple(Sli)


def objective(sli: Sli, *, bad: bool = False, where: dict[str, Any] | None = None) -> Objective:
    entry: dict[str, Any] = {"name": "o", "sli": sli.value, "target": "99%", "where": where or {}}
    if sli.is_latency:
        entry["threshold"] = "100ms" if sli is TPOT else "2s"
    entry["disconnects"] = "bad" if bad else "standard"
    return parse_spec({"service": "s", "objectives": [entry]}).objectives[0]


def record(outcome: Outcome, **fields: Any) -> RequestRecord:
    base: dict[str, Any] = {
        "request_id": "r",
        "source": Source.TAP,
        "streaming": True,
        "request_type": "chat",
    }
    return RequestRecord(outcome=outcome, **{**base, **fields})


#: How far a request came before it ended: fields of the record.
MILESTONES: dict[str, dict[str, Any]] = {
    # Promises: first token 2 s, 100 ms a token, complete in 2 s. Far over: 3 s, 150 ms, 3 s.
    "all in time": {"ttft": 1.0, "tpot": 0.05, "e2e": 1.5, "out": 11},
    "ttft late": {"ttft": 2.5, "tpot": 0.05, "e2e": 2.9, "out": 9},
    "ttft far over, pace late": {"ttft": 3.5, "tpot": 0.12, "e2e": 4.7, "out": 11},
    "pace far over": {"ttft": 0.5, "tpot": 0.2, "e2e": 2.5, "out": 11},
    "one token, in time": {"ttft": 1.0, "tpot": 0.0, "e2e": 1.0, "out": 1},
    "no token, early": {"ttft": None, "tpot": None, "e2e": 0.5, "out": 0},
    "no token, late": {"ttft": None, "tpot": None, "e2e": 2.5, "out": 0},
    "no token, far over": {"ttft": None, "tpot": None, "e2e": 60.0, "out": 0},
    "nothing seen": {"ttft": None, "tpot": None, "e2e": None, "out": None},
}
G, B, F, X, C = GOOD, BAD, FAR_OVER, LEFT_OUT, CENSORED
#: milestone -> verdicts of (error_ratio, e2e, TTFT, TPOT) for the three kinds of ending.
ENDED_WELL = {
    "all in time": (G, G, G, G),
    "ttft late": (G, B, B, G),
    "ttft far over, pace late": (G, F, F, B),
    "pace far over": (G, B, G, F),
    "one token, in time": (G, G, G, X),
    "no token, early": (G, G, X, X),
    "no token, late": (G, B, X, X),
    "no token, far over": (G, F, X, X),
    "nothing seen": (G, X, X, X),
}
FAILED = {
    "all in time": (B, B, G, G),
    "ttft late": (B, B, B, G),
    "ttft far over, pace late": (B, F, F, B),
    "pace far over": (B, B, G, F),
    "one token, in time": (B, B, G, B),
    "no token, early": (B, B, B, B),
    "no token, late": (B, B, B, B),
    "no token, far over": (B, F, F, B),
    "nothing seen": (B, B, B, B),
}
CLIENT_LEFT = {
    "all in time": (X, G, G, G),
    "ttft late": (X, B, B, G),
    "ttft far over, pace late": (X, F, F, B),
    "pace far over": (X, B, G, F),
    "one token, in time": (X, G, G, C),
    "no token, early": (X, G, C, C),
    "no token, late": (X, B, B, C),
    "no token, far over": (X, F, F, C),
    "nothing seen": (X, C, C, C),
}
NOTHING = dict.fromkeys(MILESTONES, (X, X, X, X))
TABLE = {
    Outcome.COMPLETED: ENDED_WELL,
    Outcome.LENGTH: ENDED_WELL,
    Outcome.ERROR: FAILED,
    Outcome.TIMEOUT: FAILED,
    Outcome.STUCK: FAILED,
    Outcome.REJECTED: FAILED,
    Outcome.CLIENT_ERROR: NOTHING,
    Outcome.CLIENT_DISCONNECT: CLIENT_LEFT,
    Outcome.CANCELLED: CLIENT_LEFT,
    Outcome.UNKNOWN: NOTHING,
}
ROWS = [
    (outcome, name, sli, expected)
    for outcome, by_milestone in TABLE.items()
    for name, verdicts in by_milestone.items()
    for sli, expected in zip((Sli.ERROR_RATIO, Sli.E2E, TTFT, TPOT), verdicts, strict=True)
]


def made(outcome: Outcome, milestone: str) -> RequestRecord:
    seen = MILESTONES[milestone]
    return record(
        outcome,
        time_to_first_token_seconds=seen["ttft"],
        time_per_output_token_seconds=seen["tpot"],
        e2e_seconds=seen["e2e"],
        output_tokens=seen["out"],
    )


def test_the_table_has_every_outcome_and_milestone() -> None:
    assert set(TABLE) == set(Outcome)
    assert all(set(rows) == set(MILESTONES) for rows in TABLE.values())
    assert len(ROWS) == len(Outcome) * len(MILESTONES) * len(SLIS)


@pytest.mark.parametrize(("outcome", "milestone", "sli", "expected"), ROWS)
def test_outcome_table(outcome: Outcome, milestone: str, sli: Sli, expected: Verdict) -> None:
    assert verdict(objective(sli), made(outcome, milestone)) == expected


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_DISCONNECT, Outcome.CANCELLED])
@pytest.mark.parametrize("milestone", MILESTONES)
@pytest.mark.parametrize("sli", SLIS)
def test_disconnects_bad_counts_a_client_that_leaves_as_an_error(
    outcome: Outcome, milestone: str, sli: Sli
) -> None:
    as_error = verdict(objective(sli), made(Outcome.ERROR, milestone))
    assert verdict(objective(sli, bad=True), made(outcome, milestone)) == as_error


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("sli", SLIS)
def test_probes_are_in_no_sli(outcome: Outcome, sli: Sli) -> None:
    probe = replace(made(outcome, "all in time"), request_type="probe")
    assert verdict(objective(sli, bad=True), probe) == LEFT_OUT


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "/v1/embeddings"},
        {"endpoint": "/v1/rerank/"},
        {"endpoint": "/score"},
        {"endpoint": "/pooling"},
        {"request_type": "embeddings"},
        {"request_type": "rerank"},
    ],
)
def test_requests_that_generate_nothing_have_no_ttft_and_no_tpot(fields: dict[str, Any]) -> None:
    seen = replace(made(Outcome.COMPLETED, "all in time"), **fields)
    failed = replace(made(Outcome.ERROR, "no token, late"), **fields)
    for sli in (TTFT, TPOT):
        assert verdict(objective(sli), seen) == LEFT_OUT
        assert verdict(objective(sli), failed) == LEFT_OUT
    assert verdict(objective(Sli.E2E), seen) == GOOD
    assert verdict(objective(Sli.ERROR_RATIO), failed) == BAD


def test_streamed_and_whole_answers_are_separate() -> None:
    whole = replace(made(Outcome.COMPLETED, "all in time"), streaming=False)
    unseen = replace(whole, streaming=None)
    for sli in (TTFT, TPOT):
        assert verdict(objective(sli), whole) == LEFT_OUT
        assert verdict(objective(sli), unseen) == LEFT_OUT
        assert verdict(objective(sli, where={"streaming": False}), whole) == GOOD
    assert verdict(objective(Sli.E2E), unseen) == GOOD


def test_where_selects_by_every_label() -> None:
    seen = replace(
        made(Outcome.COMPLETED, "all in time"),
        engine="vllm",
        server="h:1",
        model_name="m",
        model_version="v",
        gpu_model="g",
        tenant="t",
    )
    labels = {
        "engine": "vllm",
        "server": "h:1",
        "model_name": "m",
        "model_version": "v",
        "gpu_model": "g",
        "tenant": "t",
        "request_type": "chat",
        "streaming": "true",
    }
    assert verdict(objective(Sli.E2E, where=labels), seen) == GOOD
    for label, value in labels.items():
        other = "false" if label == "streaming" else "other"
        assert verdict(objective(Sli.E2E, where={**labels, label: other}), seen) == LEFT_OUT
        several = {**labels, label: [other, value]}
        assert verdict(objective(Sli.E2E, where=several), seen) == GOOD


@pytest.mark.parametrize(
    ("seconds", "expected"), [(2.0, GOOD), (2.0001, BAD), (3.0, BAD), (3.0001, FAR_OVER)]
)
def test_the_threshold_itself_is_in_time_and_1_5_times_it_is_not_over(
    seconds: float, expected: Verdict
) -> None:
    seen = record(Outcome.COMPLETED, e2e_seconds=seconds, time_to_first_token_seconds=seconds)
    assert verdict(objective(Sli.E2E), seen) == expected
    assert verdict(objective(TTFT), seen) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_durations_are_left_out(value: float) -> None:
    seen = record(
        Outcome.COMPLETED,
        e2e_seconds=value,
        time_to_first_token_seconds=value,
        time_per_output_token_seconds=value,
        output_tokens=5,
    )
    for sli in (Sli.E2E, TTFT, TPOT):
        assert verdict(objective(sli), seen) == LEFT_OUT
        assert verdict(objective(sli), replace(seen, outcome=Outcome.ERROR)) == BAD
        assert verdict(objective(sli), replace(seen, outcome=Outcome.CANCELLED)) == CENSORED


def test_tokens_came_but_the_first_was_not_seen() -> None:
    seen = record(Outcome.CANCELLED, e2e_seconds=9.0, output_tokens=4)
    assert verdict(objective(TTFT), seen) == CENSORED
    assert verdict(objective(TTFT), replace(seen, outcome=Outcome.ERROR)) == BAD


durations = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 10)
records = st.builds(
    record,
    st.sampled_from(Outcome),
    streaming=st.sampled_from([True, False, None]),
    request_type=st.sampled_from(["chat", "probe", "embeddings", ""]),
    endpoint=st.sampled_from([None, "/v1/chat/completions", "/v1/embeddings", "", "/"]),
    time_to_first_token_seconds=durations,
    time_per_output_token_seconds=durations,
    e2e_seconds=durations,
    output_tokens=st.none() | st.integers(0, 100),
)
objectives = st.builds(objective, st.sampled_from(SLIS), bad=st.booleans())


@given(records, objectives)
def test_a_verdict_never_contradicts_itself(seen: RequestRecord, aim: Objective) -> None:
    found = verdict(aim, seen)
    assert found in (LEFT_OUT, CENSORED, GOOD, BAD, FAR_OVER)
    assert not found.good or (found.counted and not found.over)
    assert not found.over or found.counted
    assert not (found.censored and found.counted)
    if aim.disconnects is Disconnects.BAD:
        assert not found.censored


@given(st.lists(records, max_size=30), objectives)
def test_good_and_over_never_exceed_the_total(seen: list[RequestRecord], aim: Objective) -> None:
    found = [verdict(aim, r) for r in seen]
    total = sum(v.counted for v in found)
    assert sum(v.good for v in found) + sum(v.over for v in found) <= total


@given(records, st.floats(0, 5))
def test_a_slower_request_is_never_better(seen: RequestRecord, more: float) -> None:
    before = seen.time_to_first_token_seconds
    if before is None or not 0 <= before < 1e6:
        return
    slower = replace(seen, time_to_first_token_seconds=before + more)
    fast, slow = verdict(objective(TTFT), seen), verdict(objective(TTFT), slower)
    assert fast.counted == slow.counted
    assert not (slow.good and not fast.good)
    assert not (fast.over and not slow.over)


@given(records, st.lists(objectives, max_size=5))
def test_goodput_is_every_objective_that_counts(seen: RequestRecord, aims: list[Objective]) -> None:
    counted = [v for v in (verdict(aim, seen) for aim in aims) if v.counted]
    expected = all(v.good for v in counted) if counted else None
    assert meets_all(aims, seen) is expected

"""The answers against numpy and against sums made by hand, over a real store."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servoscope.alerts.spec import default_spec
from servoscope.alerts.verdict import meets_all, verdict
from servoscope.collector.lengths import bucket_of
from servoscope.collector.overview import (
    Interval,
    IntervalError,
    budgets,
    lengths,
    overview,
    recent,
)
from servoscope.collector.slo import judge
from servoscope.collector.store import Arrival, Store
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.exporters.wire import decode_batch, encode_batch

NOW = 1_800_000_000.0
OBJECTIVES = tuple(default_spec().objectives)
HOUR = Interval(NOW - 3600, NOW, 3600)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "c.duckdb", now=NOW)
    yield opened
    opened.close()


def put(store: Store, records: list[RequestRecord], seq: int = 0, sidecar: str = "s") -> None:
    sent = encode_batch(records, sidecar_id=sidecar, epoch=1, seq=seq)
    batch = decode_batch(json.loads(json.dumps(sent)), now=NOW)
    assert batch.refused == []
    store.insert([Arrival(batch, judge(OBJECTIVES, batch.records, NOW))], NOW)


def request(number: int, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": f"req-{number}",
        "source": Source.PLUGIN,
        "outcome": Outcome.COMPLETED,
        "request_type": "chat",
        "streaming": True,
        "finished_unix_seconds": NOW - 10,
    }
    return RequestRecord(**(values | changes))


def random_records(count: int, seed: int) -> list[RequestRecord]:
    draw = random.Random(seed)

    def maybe(value: float) -> float | None:
        return value if draw.random() < 0.8 else None

    made = []
    for number in range(count):
        first, prompt = draw.lognormvariate(-1, 1), draw.randrange(1, 9000)
        made.append(
            request(
                number,
                outcome=draw.choice(list(Outcome)),
                request_type=draw.choice(["chat", "rag", "summarise", "probe"]),
                model_version=draw.choice(["v1", "v2"]),
                gpu_model=draw.choice(["none", "H200"]),
                finished_unix_seconds=NOW - draw.uniform(1, 3000),
                time_to_first_token_seconds=maybe(first),
                time_per_output_token_seconds=maybe(draw.uniform(0.01, 0.2)),
                queue_seconds=maybe(draw.uniform(0, 2)),
                e2e_seconds=first + draw.uniform(0, 50),
                prompt_tokens=prompt if draw.random() < 0.9 else None,
                cached_tokens=draw.randrange(prompt) if draw.random() < 0.7 else None,
                output_tokens=draw.randrange(0, 500) if draw.random() < 0.9 else None,
            )
        )
    return made


def test_every_number_of_a_row_is_the_same_by_numpy(store: Store) -> None:
    records = random_records(3000, seed=1)
    for seq in range(3):
        put(store, records[seq::3], seq)
    answer = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=100)
    assert len(answer.rows) == 16
    assert sum(row.requests for row in answer.rows) == 3000
    assert [row.requests for row in answer.rows] == sorted(
        (row.requests for row in answer.rows), reverse=True
    )
    for row in answer.rows:
        own = [
            r
            for r in records
            if (r.request_type, r.model_name, r.model_version, r.gpu_model)
            == (row.request_type, row.model_name, row.model_version, row.gpu_model)
        ]
        assert row.requests == len(own)
        assert row.outcomes == {
            str(outcome): n for outcome in Outcome if (n := sum(r.outcome is outcome for r in own))
        }
        for name in (
            "time_to_first_token_seconds",
            "time_per_output_token_seconds",
            "queue_seconds",
            "e2e_seconds",
        ):
            values = [v for r in own if (v := getattr(r, name)) is not None]
            found = getattr(row, name)
            assert [found.p50, found.p99] == pytest.approx(
                np.quantile(values, [0.5, 0.99]).tolist(), rel=1e-12
            )
        both = [r for r in own if r.prompt_tokens is not None and r.cached_tokens is not None]
        assert row.kv_hit_ratio == pytest.approx(
            sum(r.cached_tokens or 0 for r in both) / sum(r.prompt_tokens or 0 for r in both)
        )
        assert row.prompt_tokens == sum(r.prompt_tokens or 0 for r in own)
        assert row.output_tokens == sum(r.output_tokens or 0 for r in own)
        met = [m for r in own if (m := meets_all(OBJECTIVES, r)) is not None]
        if row.request_type == "probe":
            assert met == []
            assert row.goodput_ratio is None
        else:
            assert row.goodput_ratio == pytest.approx(sum(met) / len(met))
        assert row.last_finished_unix_seconds == max(r.finished_unix_seconds or 0 for r in own)


def test_budgets_are_the_verdicts_of_their_window(store: Store) -> None:
    records = random_records(2000, seed=2)
    day = 86_400.0
    put(store, records)
    put(store, [request(1, e2e_seconds=1.0, finished_unix_seconds=NOW - 2 * 3600)], 1)
    put(store, [request(2, e2e_seconds=1.0, finished_unix_seconds=NOW - 31 * day)], 2)
    by_name = {b.objective: b for b in budgets(store.read, OBJECTIVES, now=NOW)}
    assert list(by_name) == [o.name for o in OBJECTIVES]
    for objective in OBJECTIVES:
        verdicts = [verdict(objective, r) for r in records]
        total, good = sum(v.counted for v in verdicts), sum(v.good for v in verdicts)
        older = 1 if objective.name in ("e2e-streamed", "errors") else 0  # in 30 d, not in 1 h
        found = by_name[objective.name]
        assert (found.total, found.good) == (total + older, good + older)
        if not found.total:
            assert (found.remaining_ratio, found.burn_1h) == (None, None)
            continue
        allowed = 1 - objective.target_ratio
        assert found.remaining_ratio == pytest.approx(1 - found.bad / (found.total * allowed))
        assert found.burn_1h == pytest.approx((total - good) / total / allowed)


def test_a_store_without_records_answers(store: Store) -> None:
    answer = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=10)
    assert (answer.rows, answer.omitted_rows, answer.sidecars) == ([], 0, [])
    assert [b.total for b in answer.budgets] == [0] * len(OBJECTIVES)
    assert overview(store.read, [], HOUR, now=NOW, max_rows=10).budgets == []
    assert lengths(store.read, HOUR, now=NOW).streams == []
    assert recent(store.read, 5).records == []


def test_a_row_without_values_says_none(store: Store) -> None:
    put(store, [request(1, outcome=Outcome.UNKNOWN)])
    (row,) = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=10).rows
    assert row.time_to_first_token_seconds.p99 is None
    assert (row.kv_hit_ratio, row.goodput_ratio) == (None, None)
    assert (row.prompt_tokens, row.output_tokens) == (0, 0)


def test_zero_prompt_tokens_is_no_division(store: Store) -> None:
    put(store, [request(1, prompt_tokens=0, cached_tokens=0)])
    (row,) = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=10).rows
    assert row.kv_hit_ratio is None


def test_rows_are_bounded_and_the_rest_is_counted(store: Store) -> None:
    put(store, [request(n, model_name=f"model-{n}") for n in range(499)])
    put(store, [request(n, model_name="busy") for n in range(3)], 1)
    answer = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=5)
    assert len(answer.rows) == 5
    assert answer.rows[0].model_name == "busy"
    assert answer.omitted_rows == 495


def test_only_the_interval_counts(store: Store) -> None:
    put(
        store,
        [request(n, finished_unix_seconds=NOW - age) for n, age in enumerate((3601, 3600, 1))],
    )
    (row,) = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=5).rows
    assert row.requests == 2
    assert lengths(store.read, HOUR, now=NOW).streams == []


def test_sidecars_are_listed_by_when_they_were_seen(store: Store) -> None:
    put(store, [request(1, server="a:1", engine="vllm")], sidecar="one")
    put(store, [request(2, server="b:2", engine="llamacpp")] * 3, sidecar="two")
    answer = overview(store.read, OBJECTIVES, HOUR, now=NOW, max_rows=5)
    assert {(s.sidecar_id, s.server, s.engine, s.records) for s in answer.sidecars} == {
        ("one", "a:1", "vllm", 1),
        ("two", "b:2", "llamacpp", 3),
    }


def test_lengths_are_the_counts_of_the_records(store: Store) -> None:
    records = random_records(2000, seed=3)
    put(store, records)
    answer = lengths(store.read, HOUR, now=NOW)
    assert answer.omitted == 0
    assert len(answer.streams) == 2 * 4 * 2
    for stream in answer.streams:
        name = "prompt_tokens" if stream.side == "input" else "output_tokens"
        counts = [0] * 80
        for r in records:
            value = getattr(r, name)
            if value is not None and (r.model_version, r.request_type) == (
                stream.model_version,
                stream.request_type,
            ):
                counts[bucket_of(value)] += 1
        assert stream.counts == counts
        assert stream.total == sum(counts)


def test_length_streams_are_bounded(store: Store) -> None:
    for seq in range(6):
        put(
            store,
            [
                request(n, model_version=f"v{seq}-{n}", prompt_tokens=5, output_tokens=6)
                for n in range(1000)
            ],
            seq,
        )
    answer = lengths(store.read, HOUR, now=NOW)
    assert len(answer.streams) == 512
    assert answer.omitted == 12_000 - 512


def test_recent_is_the_newest_first(store: Store) -> None:
    put(store, [request(n, finished_unix_seconds=NOW - n) for n in range(20)])
    assert [r.request_id for r in recent(store.read, 3).records] == ["req-0", "req-1", "req-2"]


def asked(**changes: Any) -> Interval:
    values: dict[str, Any] = {
        "window_seconds": 900.0,
        "since": None,
        "until": None,
        "now": NOW,
        "max_seconds": 86_400.0,
    }
    return Interval.asked(**(values | changes))


def test_intervals() -> None:
    # without an end, a clock that is a little ahead is still seen
    assert asked() == Interval(NOW - 900, NOW + 60, 900)
    assert asked(until=NOW - 100) == Interval(NOW - 1000, NOW - 100, 900)
    assert asked(since=NOW - 50) == Interval(NOW - 50, NOW + 60, 50)
    assert asked(since=NOW - 50, until=NOW - 20) == Interval(NOW - 50, NOW - 20, 30)
    for wrong in ({"since": NOW}, {"since": NOW - 1, "until": NOW - 2}, {"since": 0.0}):
        with pytest.raises(IntervalError, match="since: "):
            asked(**wrong)

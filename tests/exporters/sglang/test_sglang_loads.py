"""SGLang's load report: captured, of several ranks, old, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.sglang.loads import SIGNALS, read_loads

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "sglang" / "0.5.23"


def report(*ranks: dict[str, Any], at: str = "2026-11-29T12:00:10+00:00") -> str:
    return json.dumps({"timestamp": at, "version": "0.5.23", "loads": list(ranks)})


def rank(
    number: int = 0, running: Any = 2, waiting: float = 1, usage: float = 0.25, **more: Any
) -> dict[str, Any]:
    return {
        "dp_rank": number, "num_running_reqs": running, "num_waiting_reqs": waiting,
        "token_usage": usage, "timestamp": 1795953609.5, **more,
    }  # fmt: skip


def test_the_captured_one() -> None:
    told = json.loads((FIXTURES / "v1_loads.json").read_text())
    loads = read_loads(json.dumps(told))
    names = ("num_running_reqs", "num_waiting_reqs", "token_usage")
    for signal, name in zip(SIGNALS, names, strict=True):
        assert loads.sample.total(signal) == sum(one[name] for one in told["loads"])
    assert loads.sample.version == "0.5.23"
    assert loads.sample.refused == ()


def test_ranks_are_apart_and_the_oldest_snapshot_tells_the_age() -> None:
    loads = read_loads(report(rank(0), rank(1, 4, 0, 0.75, timestamp=1795953600.0)))
    assert loads.sample.total("running") == 6
    assert loads.sample.peak("kv_usage_ratio") == 0.75
    assert {r.labels for r in loads.sample.readings} == {(("rank", "0"),), (("rank", "1"),)}
    assert loads.age_seconds == pytest.approx(10.0)


def test_a_snapshot_of_nothing_may_be_old() -> None:
    assert read_loads(report(rank(0, 0, 0, timestamp=1.0))).age_seconds is None


def test_0_5_9_tells_no_time_of_its_own() -> None:
    one = rank()
    del one["timestamp"]
    assert read_loads(report(one)).age_seconds is None


@pytest.mark.parametrize("bad", [-1, 1e12, 10**400, "two", True, None, float("nan")])
def test_a_bad_value_is_refused_by_name_and_the_rest_kept(bad: Any) -> None:
    loads = read_loads(report(rank(running=bad)))
    assert loads.sample.total("running") is None
    assert loads.sample.total("waiting") == 1
    assert [r.name for r in loads.sample.refused] == ([] if bad is None else ["num_running_reqs"])


@pytest.mark.parametrize("bad", [10**400, -(10**400), 1e300, float("nan"), True, "now", None])
def test_a_moment_that_cannot_be_gives_no_age(bad: Any) -> None:
    loads = read_loads(report(rank(timestamp=bad)))
    assert loads.sample.total("running") == 2
    assert loads.age_seconds is None or bad is True
    assert read_loads(report(rank(), at="0001-01-01")).sample.total("running") == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"loads": 5}', '{"loads": []}', "[" * 90_000])
def test_what_is_no_report_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"loads|JSON"):
        read_loads(text)


KEYS = st.sampled_from(["loads", "dp_rank", "num_running_reqs", "token_usage", "timestamp"])
JSON = st.recursive(
    st.none() | st.floats() | st.text() | st.sampled_from([10**400, -(10**400)]),
    lambda x: st.lists(x) | st.dictionaries(KEYS, x),
)


@given(JSON)
def test_any_json_is_a_report_or_an_error(told: Any) -> None:
    try:
        loads = read_loads(json.dumps(told))
    except ValueError:
        return
    assert all(0 <= r.value <= 1e8 for r in loads.sample.readings)

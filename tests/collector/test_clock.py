"""A clock that jumps is not acted on before it has stood by the new time for a day."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.conftest import make_batch, make_record
from servoscope.alerts.spec import Objective
from servoscope.collector.clock import GAP_SECONDS, SETTLE_SECONDS, STEP_SECONDS, Clocks, Span
from servoscope.collector.config import CollectorConfig
from servoscope.collector.service import Collector
from servoscope.exporters.records import RequestRecord

NOW = 1_800_000_000.0
YEAR = 365 * 86_400.0
HOUR = 3600.0


def test_a_clock_that_runs_is_believed() -> None:
    clocks = Clocks()
    for hour in range(1000):
        wall = NOW + hour * (HOUR + 1)  # it drifts, and is corrected: more than a step in all
        assert clocks.now(wall, hour * HOUR, NOW) == Span(wall, wall)


def test_a_jump_is_doubted_for_a_day_and_then_believed() -> None:
    for jump in (10 * YEAR, -10 * YEAR):
        clocks = Clocks()
        assert not clocks.now(NOW, 0.0, None).doubtful
        for hour in range(1, 25):
            span = clocks.now(NOW + jump + hour * HOUR, hour * HOUR, None)
            clock_before = NOW + hour * HOUR
            assert {span.earliest, span.latest} == {clock_before, clock_before + jump}
            assert span.earliest < span.latest
            assert span.doubtful
        settled = NOW + jump + 25 * HOUR
        assert clocks.now(settled, 25 * HOUR, None) == Span(settled, settled)


def test_a_jump_that_is_taken_back_leaves_nothing() -> None:
    clocks = Clocks()
    clocks.now(NOW, 0.0, None)
    assert clocks.now(NOW + YEAR, HOUR, None).doubtful
    back = NOW + 2 * HOUR
    assert clocks.now(back, 2 * HOUR, None) == Span(back, back)
    assert clocks.now(NOW + YEAR, 3 * HOUR, None).doubtful  # and the next one waits as long
    assert clocks.now(NOW + YEAR + 23 * HOUR, 26 * HOUR, None).doubtful


def test_a_clock_that_keeps_jumping_is_never_believed() -> None:
    clocks = Clocks()
    clocks.now(NOW, 0.0, None)
    for hour in range(1, 200):
        span = clocks.now(NOW + hour * YEAR, hour * HOUR, None)
        assert span.earliest == NOW + hour * HOUR


def test_a_start_is_compared_with_what_was_stored_last() -> None:
    for newest in (NOW - 10 * YEAR, NOW + 10 * YEAR):
        clocks = Clocks()
        span = clocks.now(NOW, 0.0, newest)
        assert (span.earliest, span.latest) == (min(NOW, newest), max(NOW, newest))
        later = NOW + SETTLE_SECONDS
        assert clocks.now(later, SETTLE_SECONDS, newest) == Span(later, later)
    weekend = Clocks().now(NOW, 0.0, NOW - GAP_SECONDS / 2)
    assert weekend == Span(NOW, NOW)


READINGS = st.lists(st.tuples(st.floats(0, 4e9), st.floats(0, 1e6)), min_size=1, max_size=30)


@given(READINGS, st.none() | st.floats(0, 4e9))
def test_now_always_lies_in_the_span_and_a_step_never_moves_it_at_once(
    readings: list[tuple[float, float]], newest: float | None
) -> None:
    clocks = Clocks()
    monotonic, trusted = 0.0, None
    for wall, passed in readings:
        monotonic += passed
        span = clocks.now(wall, monotonic, newest)
        assert span.earliest <= wall <= span.latest
        if trusted is not None and passed < SETTLE_SECONDS:
            expected = trusted + passed
            assert span.earliest <= expected + STEP_SECONDS + 1
            assert span.latest >= expected - STEP_SECONDS - 1
        trusted = None if span.doubtful else wall


def test_a_clock_that_jumps_years_ahead_deletes_nothing_at_once(
    tmp_path: Path, objectives: tuple[Objective, ...], caplog: pytest.LogCaptureFixture
) -> None:
    wall, monotonic = NOW, 0.0
    config = CollectorConfig(database=tmp_path / "c.duckdb")
    collector = Collector(config, objectives, lambda: wall, None, lambda: monotonic)
    intake, read = collector.intake, collector.store.read

    async def keep_once() -> None:
        keeper = asyncio.create_task(intake.keep_within_bounds())
        await asyncio.sleep(0)  # it is in the writer's queue now
        await asyncio.get_running_loop().run_in_executor(intake._writer, lambda: None)
        keeper.cancel()

    def ids() -> set[str]:
        asyncio.run(keep_once())
        return {row[0] for row in read("SELECT request_id FROM requests")}

    def take(seq: int, record: RequestRecord) -> int:
        sent = json.dumps(make_batch([record], seq)).encode()
        return asyncio.run(intake.take(sent, ""))[0].refused_values

    try:
        take(1, make_record(1))
        assert ids() == {"req-1"}
        wall, monotonic = NOW + 10 * YEAR, 60.0
        take(2, make_record(2, finished_unix_seconds=wall - 1, received_unix_seconds=wall - 2))
        assert ids() == {"req-1", "req-2"}
        assert "retention goes by the earlier time" in caplog.text
        assert b"clock_doubtful 1.0" in collector.telemetry.render(config.database)
        wall, monotonic = NOW + 120, 120.0  # it was a mistake: what came under it goes
        assert ids() == {"req-1"}
        assert b"clock_doubtful 0.0" in collector.telemetry.render(config.database)
        assert b'{reason="future"} 1.0' in collector.telemetry.render(config.database)
        # a sidecar whose clock is ahead: its times are not believed, the rest is kept as of now
        ahead = wall + YEAR
        assert take(3, make_record(3, finished_unix_seconds=ahead)) == 1
        assert read("SELECT at_unix_seconds FROM requests WHERE request_id = 'req-3'") == [(wall,)]
    finally:
        collector.close()
    # started again with the clock years ahead: the same care, from what was stored last
    wall, monotonic = NOW + 10 * YEAR, 5.0
    collector = Collector(config, objectives, lambda: wall, None, lambda: monotonic)
    intake, read = collector.intake, collector.store.read
    try:
        assert ids() == {"req-1", "req-3"}
        wall, monotonic = wall + SETTLE_SECONDS, monotonic + SETTLE_SECONDS
        assert ids() == set()  # it has been so for a day: it is so
    finally:
        collector.close()

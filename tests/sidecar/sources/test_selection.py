"""Exactly one source counts at a time; no request counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import pytest

from engines.background import background
from servoscope.exporters.records import RequestRecord, Source, SourceStatus
from servoscope.sidecar.sources.selection import Candidate, Remembered, Selection
from servoscope.sidecar.sources.source import OpenRequest, Sink

Make = Callable[..., RequestRecord]


class FakeSource:
    """Runs until cancelled; ``give`` hands a record to whoever runs it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sink: Sink | None = None
        self.runs = 0
        self.crash = False

    async def run(self, sink: Sink) -> None:
        self.runs += 1
        self.sink = sink
        try:
            if self.crash:
                raise RuntimeError("a fault of ours")
            await asyncio.Event().wait()
        finally:
            self.sink = None

    def give(self, record: RequestRecord) -> None:
        assert self.sink is not None
        self.sink(record)

    def status(self, now: float) -> SourceStatus:
        return SourceStatus(source=self.source)

    def open_requests(self) -> Iterable[OpenRequest]:
        return ()

    def drops(self) -> Mapping[str, int]:
        return {}


class Bench:
    """A plug-in, a tap and a relay that can be switched on and off."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.steady = 0.0
        self.missing: dict[Source, str | None] = {
            Source.PLUGIN: "no plug-in", Source.TAP: "no right", Source.RELAY: "not configured",
        }  # fmt: skip
        self.settled = True
        self.asked = 0
        self.counted: list[RequestRecord] = []
        self.switches: list[Source] = []
        self.plugin = FakeSource(Source.PLUGIN)
        self.tap = FakeSource(Source.TAP)
        self.relay = FakeSource(Source.RELAY)
        self.scraped_until: float | None = None
        self.selection = Selection(
            [
                Candidate(
                    self.plugin, self._plugin_missing, always=True,
                    settled=lambda: self.settled,
                ),
                Candidate(self.tap, lambda: self.missing[Source.TAP]),
                Candidate(self.relay, lambda: self.missing[Source.RELAY], always=True),
            ],
            self.counted.append,
            clock=lambda: self.now,
            steady=lambda: self.steady,
            on_switch=self.switches.append,
            scraped_until=lambda: self.scraped_until,
            grace_seconds=5.0,
            check_seconds=0.005,
        )  # fmt: skip

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not done():  # noqa: ASYNC110 - whatever the test waits for
                await asyncio.sleep(0.001)

    async def rounds(self) -> None:
        """Until it has chosen twice since now: once at least with all that was set before."""
        seen = self.asked
        await self.until(lambda: self.asked >= seen + 2)

    def _plugin_missing(self) -> str | None:
        self.asked += 1  # once a round, and first
        return self.missing[Source.PLUGIN]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    async with background(made.selection.run()):
        await asyncio.sleep(0)
        yield made
    assert made.plugin.sink is None
    assert made.tap.sink is None
    assert made.relay.sink is None


async def test_with_nothing_the_scrape_stands_in(bench: Bench) -> None:
    await bench.until(lambda: bench.selection.decided)
    assert bench.selection.in_force is None
    assert bench.switches == [Source.SCRAPE]


async def test_nothing_is_decided_before_the_plug_in_was_looked_for(bench: Bench) -> None:
    bench.settled = False
    bench.missing[Source.TAP] = None
    fresh = Bench()
    fresh.settled = False
    fresh.missing[Source.TAP] = None
    fresh.selection.choose()
    assert not fresh.selection.decided
    fresh.settled = True
    fresh.missing[Source.PLUGIN] = None
    async with background(fresh.selection.run()):
        await fresh.until(lambda: fresh.selection.in_force is fresh.plugin)
        assert fresh.tap.runs == 0


async def test_only_the_source_in_force_counts(bench: Bench, make_record: Make) -> None:
    bench.missing[Source.TAP] = None
    await bench.until(lambda: bench.tap.sink is not None and bench.relay.sink is not None)
    bench.tap.give(make_record(request_id="seen by both", source=Source.TAP))
    bench.relay.give(make_record(request_id="seen by both", source=Source.RELAY))
    assert [r.source for r in bench.counted] == [Source.TAP]


async def test_the_relay_runs_although_it_does_not_count(bench: Bench) -> None:
    bench.missing[Source.RELAY] = None
    bench.missing[Source.PLUGIN] = None
    await bench.until(lambda: bench.selection.in_force is bench.plugin)
    assert bench.relay.sink is not None


async def test_a_better_source_takes_over_and_what_it_kept_from_before_is_left_out(
    bench: Bench, make_record: Make
) -> None:
    bench.missing[Source.TAP] = None
    await bench.until(lambda: bench.tap.sink is not None)
    bench.tap.give(make_record(request_id="a", source=Source.TAP, finished_unix_seconds=1000.2))
    bench.now = 1001.0
    bench.missing[Source.PLUGIN] = None
    # its first records come before the next round: the gate itself must switch
    bench.plugin.give(make_record(request_id="a", finished_unix_seconds=1000.2))
    bench.plugin.give(make_record(request_id="b", finished_unix_seconds=1001.5))
    assert bench.selection.in_force is bench.plugin
    assert [r.request_id for r in bench.counted] == ["a", "b"]
    assert bench.selection.drops["plugin", "before_switch"] == 1
    await bench.until(lambda: bench.tap.sink is None)  # stopped: it costs


async def test_after_the_scrape_everything_counts_that_it_has_not_counted(
    bench: Bench, make_record: Make
) -> None:
    await bench.until(lambda: bench.selection.decided)
    bench.scraped_until = 990.0
    bench.missing[Source.PLUGIN] = None
    bench.plugin.give(make_record(request_id="scraped", finished_unix_seconds=989.9))
    bench.plugin.give(make_record(request_id="new", finished_unix_seconds=990.1))
    assert [r.request_id for r in bench.counted] == ["new"]


@pytest.mark.parametrize("finished", [500.0, None])
async def test_a_clock_stepped_back_after_a_switch_costs_a_minute_at_most(
    bench: Bench, make_record: Make, finished: float | None
) -> None:
    await bench.until(lambda: bench.selection.decided)
    bench.scraped_until = 990.0
    bench.missing[Source.PLUGIN] = None
    record = make_record(
        finished_unix_seconds=finished, received_unix_seconds=None, e2e_seconds=1.0
    )
    bench.plugin.give(record)
    assert bench.counted == []
    bench.steady = 59.9
    bench.plugin.give(record)
    assert bench.selection.drops["plugin", "before_switch"] == 2
    bench.steady = 60.0
    bench.plugin.give(record)
    assert bench.counted == [record]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_the_moment_of_a_switch_follows_a_step_of_the_wall_clock(
    bench: Bench, make_record: Make, jump: float
) -> None:
    await bench.until(lambda: bench.selection.decided)
    bench.scraped_until = 1000.0
    bench.missing[Source.PLUGIN] = None
    bench.plugin.give(make_record(finished_unix_seconds=1000.5))
    bench.now += 1.0 + jump
    bench.steady += 1.0
    bench.plugin.give(make_record(finished_unix_seconds=1000.9 + jump))
    bench.plugin.give(make_record(finished_unix_seconds=999.9 + jump))  # scraped before
    assert len(bench.counted) == 2
    assert bench.selection.drops["plugin", "before_switch"] == 1


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_step_of_the_wall_clock_does_not_end_the_grace(bench: Bench, jump: float) -> None:
    bench.missing[Source.TAP] = bench.missing[Source.PLUGIN] = None
    await bench.until(lambda: bench.selection.in_force is bench.plugin)
    bench.missing[Source.PLUGIN] = "gone"
    await bench.rounds()
    bench.now += jump
    await bench.rounds()
    assert bench.selection.in_force is bench.plugin
    bench.steady += 5.5
    await bench.until(lambda: bench.selection.in_force is bench.tap)


async def test_at_the_start_what_the_plug_in_kept_does_count(
    bench: Bench, make_record: Make
) -> None:
    fresh = Bench()
    fresh.missing[Source.PLUGIN] = None
    async with background(fresh.selection.run()):
        await fresh.until(lambda: fresh.plugin.sink is not None)
        fresh.plugin.give(make_record(finished_unix_seconds=10.0))
        assert len(fresh.counted) == 1


async def test_a_lost_source_gives_way_after_the_grace_and_not_before(bench: Bench) -> None:
    bench.missing[Source.TAP] = bench.missing[Source.PLUGIN] = None
    await bench.until(lambda: bench.selection.in_force is bench.plugin)
    bench.missing[Source.PLUGIN] = "engine is starting again"
    await bench.rounds()
    bench.steady += 4.0
    await bench.rounds()
    assert bench.selection.in_force is bench.plugin
    bench.missing[Source.PLUGIN] = None  # it came back: the clock starts anew
    await bench.rounds()
    bench.missing[Source.PLUGIN] = "gone"
    await bench.rounds()
    bench.steady += 4.0
    await bench.rounds()
    assert bench.selection.in_force is bench.plugin
    bench.steady += 1.5
    await bench.until(lambda: bench.selection.in_force is bench.tap)


async def test_a_source_that_crashes_is_started_again(bench: Bench) -> None:
    bench.tap.crash = True
    bench.missing[Source.TAP] = None
    await bench.until(lambda: bench.tap.runs >= 3)
    bench.tap.crash = False
    await bench.until(lambda: bench.tap.sink is not None)


async def test_a_source_that_always_runs_is_started_again_though_it_is_not_chosen(
    bench: Bench,
) -> None:
    bench.plugin.crash = True
    bench.missing[Source.TAP] = None
    assert bench.plugin.sink is not None
    assert bench.selection._tasks[0].cancel()
    await bench.until(lambda: bench.plugin.runs >= 3)
    bench.plugin.crash = False
    await bench.until(lambda: bench.plugin.sink is not None)
    bench.missing[Source.PLUGIN] = None
    await bench.until(lambda: bench.selection.in_force is bench.plugin)


def test_a_question_that_costs_is_asked_again_only_after_a_while() -> None:
    now, asked = [0.0], []

    def ask() -> str | None:
        asked.append(now[0])
        return "no right" if len(asked) == 1 else None

    question = Remembered(ask, 10.0, lambda: now[0])
    assert [question(), question()] == ["no right", "no right"]
    now[0] = 10.0
    assert question() is None
    assert asked == [0.0, 10.0]


async def test_a_record_without_an_end_is_dated_by_its_start(
    bench: Bench, make_record: Make
) -> None:
    bench.missing[Source.TAP] = None
    await bench.until(lambda: bench.tap.sink is not None)
    bench.missing[Source.PLUGIN] = None
    bench.now = 1000.0
    late = {"finished_unix_seconds": None, "received_unix_seconds": 999.5, "e2e_seconds": 2.0}
    bench.plugin.give(make_record(**late))
    bench.plugin.give(make_record(**{**late, "e2e_seconds": 0.1}))
    bench.plugin.give(make_record(**{**late, "received_unix_seconds": None}))
    assert len(bench.counted) == 1
    assert bench.selection.drops["plugin", "before_switch"] == 2

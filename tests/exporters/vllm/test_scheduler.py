from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exporters.vllm import fakes
from servoscope.exporters.knobs.pilot import MAX_FAULTS
from servoscope.exporters.vllm.scheduler import Pilot, steered, wrap_scheduler_config
from servoscope.exporters.vllm.scheduler_access import read_envelope


def made(base: type = fakes.Scheduler, **config: Any) -> tuple[Any, Pilot]:
    """A steered scheduler whose Pilot has a clock that tests move."""
    pilots: list[Pilot] = []
    scheduler = steered(base, pilots.append)(fakes.vllm_config(**config))
    pilot = pilots[0]
    pilot._clock = fakes.Clock()
    return scheduler, pilot


def turn(pilot: Pilot, **values: float) -> None:
    now = pilot._clock()
    pilot.law.lease("test", 30, now)
    pilot.law.set("test", values, now, len(pilot.scheduler.running))


def prompts(scheduler: Any, count: int, tokens: int, output: int = 4) -> None:
    for number in range(count):
        scheduler.add_request(fakes.SchedulerRequest(f"{number}", tokens, output))


def drain(scheduler: Any) -> list[int]:
    steps = []
    while scheduler.running or scheduler.waiting:
        steps.append(scheduler.schedule().total_num_scheduled_tokens)
        assert len(steps) < 10_000
    return steps


@pytest.mark.parametrize("base", [fakes.Scheduler, fakes.OldScheduler])
def test_untouched_it_schedules_exactly_as_the_class_beneath(base: type) -> None:
    plain, (wrapped, pilot) = base(fakes.vllm_config()), made(base)
    for scheduler in (plain, wrapped):
        prompts(scheduler, 12, 700)
    assert drain(plain) == drain(wrapped)
    assert pilot.counters.steps > 0
    assert pilot.faults == 0


@pytest.mark.parametrize("base", [fakes.Scheduler, fakes.OldScheduler])
def test_a_smaller_chunk_bounds_every_step_and_everything_finishes(base: type) -> None:
    scheduler, pilot = made(base)
    turn(pilot, chunk_tokens=256)
    prompts(scheduler, 10, 1000)
    assert max(drain(scheduler)) == 256
    assert pilot.counters.take_step_tokens_max() == 256
    assert pilot.counters.take_step_tokens_max() == 0


def test_a_change_made_while_idle_reaches_the_first_request() -> None:
    scheduler, pilot = made()
    turn(pilot, chunk_tokens=256)
    prompts(scheduler, 1, 1000)
    assert scheduler.limits_at_add == [256]  # applied before vLLM's own add_request


def test_the_lease_that_runs_out_reverts_in_the_engines_own_thread() -> None:
    scheduler, pilot = made()
    turn(pilot, chunk_tokens=256, max_running_requests=2, long_prefill_threshold_tokens=64)
    prompts(scheduler, 8, 3000)
    scheduler.schedule()
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (256, 2)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 64
    pilot._clock.now += 31  # type: ignore[attr-defined]
    scheduler.schedule()
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (2048, 8)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


@pytest.mark.parametrize("base", [fakes.Scheduler, fakes.OldScheduler])
def test_fewer_slots_than_running_requests_drain_and_never_trip_the_assert(base: type) -> None:
    scheduler, pilot = made(base)
    prompts(scheduler, 8, 100, output=20)
    scheduler.schedule()
    assert len(scheduler.running) == 8
    turn(pilot, max_running_requests=2)
    prompts(scheduler, 8, 100, output=20)
    seen = []
    while scheduler.running or scheduler.waiting:
        scheduler.schedule()
        seen.append(len(scheduler.running))
    assert max(seen) == 8
    assert max(seen[seen.index(min(seen)) :]) <= 2
    assert pilot.faults == 0


def test_the_budget_is_lifted_when_more_run_than_it_can_decode() -> None:
    scheduler, pilot = made()
    turn(pilot, chunk_tokens=4)
    prompts(scheduler, 8, 3, output=50)
    drain(scheduler)
    prompts(scheduler, 8, 3, output=50)
    for _ in range(40):
        scheduler.schedule()
    assert len(scheduler.running) == 8
    assert scheduler.max_num_scheduled_tokens == 9


def test_batch_window_groups_arrivals_and_decodes_go_on() -> None:
    scheduler, pilot = made()
    prompts(scheduler, 1, 10, output=1000)
    scheduler.schedule()
    turn(pilot, batch_window_seconds=0.25)
    slots = scheduler.max_num_active_reqs
    for number in range(3):
        scheduler.add_request(fakes.SchedulerRequest(f"late{number}", 100, 4))
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"0": 1}  # the running one, nobody else
        assert scheduler.max_num_active_reqs == slots  # put back after the step
        pilot._clock.now += 0.05  # type: ignore[attr-defined]
    pilot._clock.now += 0.2  # type: ignore[attr-defined]
    assert len(scheduler.schedule().num_scheduled_tokens) == 4
    assert pilot.counters.held_steps == 3


def test_arguments_pass_through() -> None:
    scheduler, _pilot = made()
    scheduler.schedule(True)
    scheduler.schedule(throttle_prefills=True)
    assert scheduler.arguments == [(True,), (("throttle_prefills", True),)]


def test_the_engines_own_error_gets_out_and_the_hold_is_undone() -> None:
    class Failing(fakes.Scheduler):
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the engine's own")

    scheduler, pilot = made(Failing)
    turn(pilot, batch_window_seconds=1.0)
    prompts(scheduler, 1, 10)
    with pytest.raises(RuntimeError, match="the engine's own"):
        scheduler.schedule()
    assert scheduler.max_num_active_reqs == 8
    assert pilot.faults == 0


def test_faults_of_ours_never_get_out_and_end_in_boot_values() -> None:
    scheduler, pilot = made()
    turn(pilot, chunk_tokens=256)
    prompts(scheduler, 1, 100)
    scheduler.schedule()
    assert scheduler.max_num_scheduled_tokens == 256

    def broken(*_: Any) -> Any:
        raise ValueError("ours")

    pilot._window.holds = broken  # type: ignore[method-assign,assignment]
    for number in range(MAX_FAULTS + 5):
        scheduler.add_request(fakes.SchedulerRequest(f"more{number}", 10, 2))
        scheduler.schedule()
    assert pilot.faults == MAX_FAULTS
    assert "ours" in pilot.off
    assert scheduler.max_num_scheduled_tokens == 2048
    drain(scheduler)


def test_bypass_passes_straight_through_and_ends_with_the_lease() -> None:
    scheduler, pilot = made()
    turn(pilot, chunk_tokens=2048)
    pilot.law.bypass("test", True, pilot._clock())
    prompts(scheduler, 2, 100)
    scheduler.schedule()
    assert pilot.counters.steps == 0
    pilot._clock.now += 31  # type: ignore[attr-defined]
    scheduler.schedule()
    assert pilot.counters.steps == 1


def test_an_unknown_layout_says_what_is_missing_and_stays_off() -> None:
    class Strange:
        def __init__(self, _config: Any) -> None:
            self.running: list[Any] = []

        def add_request(self, request: Any) -> str:
            return f"added {request}"

        def schedule(self) -> str:
            return "scheduled"

    pilots: list[Pilot] = []
    scheduler = steered(Strange, pilots.append)(None)
    assert scheduler.add_request("r") == "added r"
    assert scheduler.schedule() == "scheduled"
    assert "scheduler.max_num_scheduled_tokens" in pilots[0].missing
    assert "unknown layout" in pilots[0].off


def test_a_socket_that_cannot_be_opened_leaves_the_engine_alone() -> None:
    def fails(_pilot: Pilot) -> None:
        raise PermissionError("no directory")

    scheduler = steered(fakes.Scheduler, fails)(fakes.vllm_config())
    prompts(scheduler, 2, 100)
    assert drain(scheduler)


def test_whatever_class_vllm_picks_is_wrapped_once() -> None:
    class Config(fakes.SchedulerConfig):
        pass

    assert wrap_scheduler_config(Config, lambda _: None) == ""
    assert wrap_scheduler_config(Config, lambda _: None) == ""
    picked = Config().get_scheduler_cls()
    assert picked.__mro__[1] is fakes.Scheduler
    assert picked.__name__ == "SteeredScheduler"
    custom = Config(scheduler_cls=fakes.OldScheduler).get_scheduler_cls()
    assert issubclass(custom, fakes.OldScheduler)
    assert steered(custom, lambda _: None) is custom
    assert "before 0.11.1" in wrap_scheduler_config(object, lambda _: None)


def test_envelope_of_engines_that_must_not_be_tuned() -> None:
    scheduler = fakes.Scheduler(fakes.vllm_config(enable_chunked_prefill=False))
    assert "chunked prefill is off" in read_envelope(scheduler).refused["chunk_tokens"]
    scheduler = fakes.Scheduler(fakes.vllm_config(disable_chunked_mm_input=True))
    assert "image" in read_envelope(scheduler).refused["chunk_tokens"]
    scheduler = fakes.Scheduler(fakes.vllm_config())
    scheduler.vllm_config.parallel_config.data_parallel_size = 2
    scheduler.num_spec_tokens = 3
    scheduler.need_mamba_block_aligned_split, scheduler.block_size = True, 128  # type: ignore[attr-defined]
    envelope = read_envelope(scheduler)
    assert "data parallel" in envelope.refused["batch_window_seconds"]
    assert envelope.least_chunk(1) == 128
    assert envelope.least_chunk(100) == 401


def test_step_output_without_a_token_count_is_a_counted_fault() -> None:
    class Other(fakes.Scheduler):
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(other=1)

    scheduler, pilot = made(Other)
    assert scheduler.schedule().other == 1
    assert pilot.faults == 1

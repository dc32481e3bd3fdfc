from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.sglang import engine_fakes as fakes
from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.pilot import MAX_FAULTS
from servoscope.exporters.sglang.messages import KnobChange, KnobHold
from servoscope.exporters.sglang.scheduler_access import arrivals, batch_tokens, read_envelope
from servoscope.exporters.sglang.steering import Pilot


def turn(group: fakes.Group, ttl: float = 30, **values: float) -> None:
    now = group.clocks[0].now
    group.first.law.lease("test", ttl, now)
    group.first.law.set("test", values, now, 0)


def test_nothing_is_added_while_nobody_turned_anything() -> None:
    group = fakes.Group(2)
    pulled: list[Any] = [fakes.TokenizedGenerateReqInput()]
    group.first.outgoing(pulled)
    assert len(pulled) == 1
    received = list(pulled)
    assert group.pilots[1].incoming(received) is received
    assert group.step(3) == [3, 3]


def test_every_rank_changes_in_the_same_pass_and_goes_back_in_the_same_pass() -> None:
    group = fakes.Group(3)
    turn(group, chunk_tokens=512, max_running_requests=4)
    assert {v["chunk_tokens"] for v in group.values()} == {2048}
    group.step()
    assert [s.chunked_prefill_size for s in group.schedulers] == [512] * 3
    assert [s.prefill_decode_interval for s in group.schedulers] == [1] * 3
    assert [p.pp_max_micro_batch_size for p in group.parallels] == [4] * 3
    group.pass_seconds(29.9)
    group.step()
    assert [s.chunked_prefill_size for s in group.schedulers] == [512] * 3
    group.pass_seconds(0.2)  # nobody renewed; the socket's thread may hang, it does not matter
    group.step()
    assert [s.chunked_prefill_size for s in group.schedulers] == [2048] * 3
    assert [s.prefill_decode_interval for s in group.schedulers] == [0] * 3
    assert [p.pp_max_micro_batch_size for p in group.parallels] == [16] * 3


def test_release_goes_the_same_way() -> None:
    group = fakes.Group(2)
    turn(group, chunk_tokens=512)
    group.step()
    group.first.law.release("test", group.clocks[0].now)
    assert {v["chunk_tokens"] for v in group.values()} == {512}
    group.step()
    assert {v["chunk_tokens"] for v in group.values()} == {2048}
    pulled: list[Any] = []
    group.first.outgoing(pulled)
    assert pulled == []


def test_the_engines_own_keys_are_written_by_its_own_handlers() -> None:
    own = ("pp_max_micro_batch_size", "chunked_prefill_size")
    group = fakes.Group(2, own=own)
    turn(group, chunk_tokens=256, max_running_requests=3)
    group.step()
    for scheduler in group.schedulers:
        assert scheduler.internal_state.asked == [
            {"chunked_prefill_size": 256, "pp_max_micro_batch_size": 3}
        ]
        assert scheduler.chunked_prefill_size == 256
    assert [pilot.faults for pilot in group.pilots] == [0, 0]


def test_a_handler_of_the_engine_that_refuses_is_a_fault_and_is_seen_in_what_is_read_back() -> None:
    group = fakes.Group(2)
    for scheduler in group.schedulers:
        scheduler.internal_state.refuse = True
    turn(group, max_running_requests=3)
    group.step()
    assert [v["max_running_requests"] for v in group.values()] == [16, 16]
    assert [pilot.faults for pilot in group.pilots] == [1, 1]


def test_a_shorter_interval_cuts_what_is_left_of_the_longer_one() -> None:
    group = fakes.Group(1)
    turn(group, prefill_decode_interval=64)
    group.step()
    group.schedulers[0]._prefill_decode_interval_remaining = 50
    turn(group, prefill_decode_interval=2)
    group.step()
    assert group.schedulers[0]._prefill_decode_interval_remaining == 2


def test_a_window_holds_all_ranks_until_its_end_by_the_first_ranks_clock() -> None:
    group = fakes.Group(2)
    turn(group, batch_window_seconds=0.5)
    assert group.step(1) == [0, 0]
    group.pass_seconds(0.3)
    group.clocks[1].now += 1000  # what another rank thinks of the time does not matter
    assert group.step(2) == [0, 0]
    group.pass_seconds(0.3)
    assert group.step(0) == [3, 3]
    assert group.step(0) == [0, 0]


def test_a_window_ends_when_enough_wait() -> None:
    group = fakes.Group(2)
    turn(group, batch_window_seconds=1.0, batch_window_min_requests=4)
    assert group.step(2) == [0, 0]
    assert group.step(1) == [0, 0]
    assert group.step(1) == [4, 4]


def test_a_chunk_in_progress_is_never_held() -> None:
    group = fakes.Group(2)
    turn(group, batch_window_seconds=1.0)
    for scheduler in group.schedulers:
        scheduler.chunked_req = object()
    assert group.step(2) == [2, 2]


def test_requests_that_come_back_are_not_held() -> None:
    group = fakes.Group(2)
    turn(group, batch_window_seconds=1.0)
    assert group.step(1) == [0, 0]
    for scheduler in group.schedulers:
        scheduler.waiting_queue += [1]  # retracted: it has waited already
    assert group.step(0) == [2, 2]


def test_a_hold_that_is_not_sent_again_is_over() -> None:
    group = fakes.Group(1)
    pilot = group.first
    assert pilot.incoming([KnobHold()]) == []
    assert pilot.holds_prefill()
    pilot.incoming([])
    assert not pilot.holds_prefill()


def test_the_native_delayer_is_the_window_where_there_is_one() -> None:
    delayer = SimpleNamespace(_max_delay_ms=400.0, _queue_trigger_enabled=True)
    group = fakes.Group(1, prefill_delayer=delayer)
    assert group.values()[0]["batch_window_seconds"] == 0.4
    turn(group, batch_window_seconds=0.1)
    assert group.step(1) == [1]  # held by the engine, not by us
    assert delayer._max_delay_ms == 100.0
    with pytest.raises(KnobRefusedError, match="queue-min-ratio"):
        turn(group, batch_window_min_requests=2)


@pytest.mark.parametrize(
    ("flags", "knob", "why"),
    [
        ({"chunked_prefill_size": None}, "chunk_tokens", "off at boot"),
        ({"dynamic_chunk_sizer": object()}, "chunk_tokens", "enable-dynamic-chunking"),
        ({}, "mixed_chunk", "--enable-mixed-chunk"),
        ({"recv_skipper": object()}, "batch_window_seconds", "--scheduler-recv-interval"),
        (
            {"prefill_delayer": SimpleNamespace(_max_delay_ms=1.0, _queue_trigger_enabled=False)},
            "batch_window_seconds",
            "queue-min-ratio",
        ),
    ],
)
def test_what_this_engine_cannot_do_is_refused_with_the_reason(
    flags: dict[str, Any], knob: str, why: str
) -> None:
    parallel = fakes.parallel_of()
    law = read_envelope(fakes.Scheduler(parallel, **flags), parallel)
    assert why in law.bounds()[knob].why
    with pytest.raises(KnobRefusedError, match=why):
        law.changed(law.boot, {knob: 1})


def test_the_floor_of_the_chunk_is_the_page_or_the_models_alignment() -> None:
    parallel = fakes.parallel_of()
    law = read_envelope(
        fakes.Scheduler(parallel, page_size=16, truncation_align_size=256), parallel
    )
    assert (law.chunk_floor, law.chunk_multiple) == (256, 16)


@pytest.mark.parametrize(
    ("flags", "place", "why"),
    [
        ({"disaggregation_mode": SimpleNamespace(value="prefill")}, {}, "disaggregation"),
        ({}, {"pp_size": 2}, "pipeline parallel"),
        ({}, {"attn_dp_enabled": True}, "DP attention"),
        ({}, {"nnodes": 2}, "several nodes"),
        ({"dllm_config": object()}, {}, "diffusion"),
    ],
)
def test_engines_that_may_not_be_steered_are_left_alone(
    flags: dict[str, Any], place: dict[str, Any], why: str
) -> None:
    parallel = fakes.parallel_of(**place)
    pilot = Pilot(fakes.Scheduler(parallel, **flags), fakes.parts_of(parallel))
    assert why in pilot.off
    pulled: list[Any] = []
    pilot.outgoing(pulled)
    assert pulled == []
    assert pilot.counts() == (0, 0)


def test_an_attribute_that_vanished_turns_it_off_by_name() -> None:
    parallel = fakes.parallel_of()
    scheduler = fakes.Scheduler(parallel)
    del scheduler.prefill_decode_interval
    pilot = Pilot(scheduler, fakes.parts_of(parallel))
    assert pilot.off == "this version lacks Scheduler.prefill_decode_interval"


def test_faults_stay_here_and_after_some_the_boot_values_go_to_all_ranks() -> None:
    group = fakes.Group(2)
    turn(group, chunk_tokens=512, batch_window_seconds=0.5)
    group.step()
    assert {v["chunk_tokens"] for v in group.values()} == {512}
    waiting, group.schedulers[0].waiting_queue = group.schedulers[0].waiting_queue, None  # type: ignore[assignment]
    pulled: list[Any] = []
    for _ in range(MAX_FAULTS):
        group.first.outgoing(pulled)
    assert pulled == []
    assert group.first.off.startswith(f"{MAX_FAULTS} errors")
    group.schedulers[0].waiting_queue = waiting
    group.step()
    assert {s.chunked_prefill_size for s in group.schedulers} == {2048}


def test_garbage_in_a_message_is_a_fault_not_an_end() -> None:
    group = fakes.Group(1)
    request = fakes.TokenizedGenerateReqInput()
    assert group.first.incoming([KnobChange({}), request]) == [request]
    assert group.first.faults == 1


def test_arrivals_and_tokens_are_counted_by_kind() -> None:
    kinds = [
        fakes.TokenizedGenerateReqInput(),
        fakes.BatchTokenizedGenerateReqInput(3),
        fakes.SetInternalStateReq({}),
    ]
    assert arrivals(kinds) == 4

    def batch(mode: str) -> Any:
        return SimpleNamespace(
            forward_mode=fakes.ForwardMode(mode), extend_num_tokens=100, batch_size=lambda: 7
        )

    assert [batch_tokens(batch(mode)) for mode in ("extend", "mixed", "decode", "idle")] == [
        100, 100, 7, 0,
    ]  # fmt: skip


ACTIONS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from([256, 512, 2048]), st.sampled_from([0.0, 0.2])),
    st.tuples(st.just("arrive"), st.integers(0, 3), st.just(0.0)),
    st.tuples(st.just("wait"), st.just(0), st.floats(0, 40)),
    st.tuples(st.just("release"), st.just(0), st.just(0.0)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_ranks_never_part_whatever_is_set_and_whenever_leases_end(
    actions: list[tuple[str, int, float]],
) -> None:
    group = fakes.Group(3)
    for action, number, seconds in actions:
        if action == "set":
            turn(group, chunk_tokens=number, batch_window_seconds=seconds)
        elif action == "wait":
            group.pass_seconds(seconds)
        elif action == "release" and group.first.law.holder(group.clocks[0].now):
            group.first.law.release("test", group.clocks[0].now)
        admitted = group.step(number if action == "arrive" else 0)
        assert len(set(admitted)) == 1
        values = group.values()
        assert values[0] == values[1] == values[2]
        assert values[0] == group.first.law.asked(group.clocks[0].now).as_json()
    group.pass_seconds(31)
    group.step()
    assert group.values() == [group.first.envelope.boot.as_json()] * 3

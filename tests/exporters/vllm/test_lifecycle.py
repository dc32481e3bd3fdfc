from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from exporters.vllm import fakes
from servoscope.exporters.vllm.hooks import MAX_FAULTS, Hooks, install
from servoscope.exporters.vllm.lifecycle import MAX_LISTED, SWEEP_ABOVE, Lifecycle


class Engine:
    """An OutputProcessor with our hooks on it, and what they emitted."""

    def __init__(self, **options: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.clock = fakes.Clock(200.0)
        self.hooks = Hooks()
        self.life = Lifecycle(self.messages.append, clock=self.clock, **options)
        self.processor_class, self.stats_class, self.llm_class = fakes.fresh_classes()
        self.missing = install(
            self.hooks, self.life, self.processor_class, self.stats_class, self.llm_class
        )
        self.processor = self.processor_class()

    def add(
        self, ident: str, external: str, parent: fakes.ParentRequest | None = None, **more: Any
    ) -> None:
        request = fakes.EngineCoreRequest(ident, external, more.pop("arrival", 100.0), **more)
        self.processor.add_request(request, None, parent)

    def run(
        self, ident: str, tokens: int = 3, finish: fakes.FinishReason = fakes.FinishReason.LENGTH
    ) -> None:
        for number in range(tokens):
            self.processor.process(
                ident,
                1,
                10.0 + number,
                self.stats_class(101.0 + number),
                events=(9.0, 9.5) if number == 0 else None,
                finish=finish if number == tokens - 1 else None,
            )

    def status(self, waiting: int) -> None:
        stats = SimpleNamespace(num_waiting_reqs=waiting, num_skipped_waiting_reqs=0)
        self.life.stepped(0, stats, None)


def abort_as(engine: Engine, error: BaseException, idents: list[str]) -> None:
    """As AsyncLLM.generate does: in the except of the request's own coroutine."""

    async def abort() -> None:
        engine.processor.abort_requests(idents, internal=True)

    def fail() -> None:
        raise error

    async def generate() -> None:
        try:
            fail()
        except BaseException:
            await abort()

    asyncio.run(generate())


def test_a_request_is_one_record() -> None:
    engine = Engine()
    engine.add("i1", "cmpl-foo-0", priority=5, lora_name="adapter")
    engine.run("i1", tokens=4)
    (message,) = engine.messages
    assert message["request_id"] == "cmpl-foo"
    assert message["outcome"] == "length"
    assert message["output_tokens"] == 4
    assert message["queue_seconds"] == 0.5
    assert message["time_to_first_token_seconds"] == 1.0
    assert message["e2e_seconds"] == 4.0
    assert list(message["inter_token_seconds"]) == [1.0, 1.0, 1.0]
    assert (message["priority"], message["lora"], message["rank"]) == (5, "adapter", 0)
    assert len(engine.life) == 0
    assert engine.missing == []


def test_an_abort_after_the_end_adds_nothing_and_the_other_way_round() -> None:
    engine = Engine()
    engine.add("i1", "cmpl-a-0")
    state = engine.processor.request_states["i1"]
    engine.run("i1")
    engine.processor.abort_requests(["i1"], internal=True)
    engine.add("i2", "cmpl-b-0")
    abort_as(engine, asyncio.CancelledError(), ["i2"])
    engine.life.finished(state, fakes.FinishReason.STOP, None)
    assert [m["outcome"] for m in engine.messages] == ["length", "client_disconnect"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), "client_disconnect"),
        (GeneratorExit(), "client_disconnect"),
        (ValueError("the server's own"), "error"),
    ],
)
def test_who_aborted(error: BaseException, outcome: str) -> None:
    engine = Engine()
    engine.add("i1", "chatcmpl-a")
    abort_as(engine, error, ["i1"])
    (message,) = engine.messages
    assert (message["outcome"], message["finish_reason"]) == (outcome, "abort")


def test_an_abort_call_by_external_id_is_cancelled() -> None:
    engine = Engine()
    engine.add("i1", "chatcmpl-a")
    engine.processor.abort_requests(["chatcmpl-a"], internal=False)
    assert [m["outcome"] for m in engine.messages] == ["cancelled"]


def test_the_phase_an_aborted_request_was_in() -> None:
    engine = Engine()
    for number in range(4):
        engine.add(f"i{number}", f"chatcmpl-{number}", arrival=100.0 + number)
    engine.processor.process("i0", 1, 10.0, engine.stats_class(150.0), events=(9.0, 9.5))
    engine.status(waiting=2)  # i2 and i3: the youngest
    for number in (0, 1, 3):
        engine.processor.abort_requests([f"i{number}"], internal=True)
    phases = {m["request_id"][-1]: m["phase"] for m in engine.messages}
    assert phases == {"0": "decode", "1": "prefill", "3": "queued"}
    assert [m["phase_estimated"] for m in engine.messages] == [False, True, True]


def test_samples_are_one_record_and_so_is_their_abort() -> None:
    engine = Engine()
    parent = fakes.ParentRequest("p1", "chatcmpl-n")
    for index in range(3):
        engine.add(f"{index}_p1", "chatcmpl-n", parent)
    engine.run("0_p1")
    engine.run("2_p1", tokens=5)
    assert engine.messages == []
    engine.run("1_p1")
    (message,) = engine.messages
    assert (message["choices"], message["output_tokens"], message["prompt_tokens"]) == (3, 11, 10)

    parent = fakes.ParentRequest("p2", "chatcmpl-m")
    for index in range(2):
        engine.add(f"{index}_p2", "chatcmpl-m", parent)
    abort_as(engine, asyncio.CancelledError(), ["p2"])  # through the parent: a nested call
    assert [m["outcome"] for m in engine.messages[1:]] == ["client_disconnect"]


def test_prompts_of_a_list_are_one_record() -> None:
    engine = Engine()
    for index in range(3):
        engine.add(f"i{index}", f"cmpl-list-{index}")
    for index in (2, 0, 1):
        engine.run(f"i{index}")
    (message,) = engine.messages
    assert (message["prompts"], message["prompt_tokens"]) == (3, 30)
    assert engine.life._numbered == {}


def test_two_clients_with_the_same_request_id_are_two_records() -> None:
    engine = Engine()
    engine.add("a0", "cmpl-same-0")
    engine.add("b0", "cmpl-same-0")
    engine.add("b1", "cmpl-same-1")
    for ident in ("a0", "b1", "b0"):
        engine.run(ident)
    assert sorted(m["prompts"] for m in engine.messages) == [1, 2]


def test_beams_are_left_out_and_counted() -> None:
    engine = Engine()
    engine.add("i1", "cmpl-foo-" + "a" * 32 + "-beam-0")
    engine.run("i1")
    assert engine.messages == []
    assert engine.life.beams == 1


def test_a_dead_engine_is_an_error_for_every_request_once() -> None:
    engine = Engine()
    engine.add("i1", "chatcmpl-1")
    engine.add("i2", "chatcmpl-2")
    engine.processor.propagate_error(RuntimeError("dead"))
    abort_as(engine, RuntimeError("dead"), ["i1", "i2"])
    assert [m["outcome"] for m in engine.messages] == ["error", "error"]
    assert len(engine.processor.raised) == 1


def test_a_request_refused_at_the_door_is_rejected() -> None:
    engine = Engine()
    engine.llm_class.limit = 0  # type: ignore[attr-defined]
    with pytest.raises(fakes.QueueOverflowError):
        engine.llm_class().check_admission(1, request_id="cmpl-foo-0-12345678")
    with pytest.raises(fakes.QueueOverflowError):
        engine.llm_class().check_admission(1)
    assert [(m["outcome"], m["status_code"]) for m in engine.messages] == [("rejected", 503)] * 2
    assert engine.messages[1]["request_id"] == "rejected-2"


def test_the_rank_comes_with_the_batch_of_outputs() -> None:
    engine = Engine(ranks=2)
    engine.add("i1", "chatcmpl-1")
    stats = engine.stats_class(101.0)
    engine.processor.process("i1", 1, 10.0, stats, finish=fakes.FinishReason.STOP)
    assert engine.messages == []
    engine.life.stepped(1, None, stats)
    assert [m["rank"] for m in engine.messages] == [1]
    engine.add("i2", "chatcmpl-2")
    engine.processor.abort_requests(["i2"], internal=True)
    assert engine.messages[1]["rank"] is None  # an abort does not say


def test_open_requests_are_listed_once_a_call_and_capped() -> None:
    engine = Engine()
    parent = fakes.ParentRequest("p", "chatcmpl-n")
    engine.add("0_p", "chatcmpl-n", parent, arrival=100.0)
    engine.add("1_p", "chatcmpl-n", parent, arrival=100.0)
    engine.processor.process("0_p", 1, 10.0, engine.stats_class(101.0))
    listed, total = engine.life.snapshot()
    assert total == 1
    assert listed[0]["phase"] == "decode"
    for number in range(MAX_LISTED + 100):
        engine.add(f"x{number}", f"chatcmpl-x{number}")
    listed, total = engine.life.snapshot()
    assert (len(listed), total) == (MAX_LISTED, MAX_LISTED + 101)


def test_a_version_that_ends_requests_unseen_does_not_grow_us() -> None:
    engine = Engine()
    for number in range(SWEEP_ABOVE * 3):
        engine.add(f"x{number}", f"cmpl-x{number}-0")
        engine.processor.request_states.clear()  # ended, and nobody told us
    assert len(engine.life) <= SWEEP_ABOVE
    assert len(engine.life._numbered) <= SWEEP_ABOVE
    assert engine.life.lost >= SWEEP_ABOVE * 2


def test_faults_of_ours_never_reach_the_engine_and_end_in_unhooking() -> None:
    engine = Engine()
    original = engine.processor_class.__dict__["add_request"].__wrapped__

    def broken(*_: Any) -> None:
        raise ValueError("ours")

    engine.life.registered = broken  # type: ignore[method-assign,assignment]
    for number in range(MAX_FAULTS + 3):
        engine.add(f"i{number}", f"chatcmpl-{number}")
        engine.run(f"i{number}")
    assert engine.hooks.faults == MAX_FAULTS
    assert "ours" in engine.hooks.off
    assert engine.processor_class.__dict__["add_request"] is original
    assert not engine.hooks.installed
    assert engine.messages == []


def test_the_engines_own_error_gets_out_as_it_is() -> None:
    engine = Engine()
    with pytest.raises(AttributeError):
        engine.processor.add_request(None)
    assert engine.hooks.faults == 0


def test_bypass_sees_nothing() -> None:
    engine = Engine()
    engine.hooks.bypass = True
    engine.add("i1", "chatcmpl-1")
    engine.run("i1")
    assert engine.messages == []


def without(name: str) -> Callable[[], list[str]]:
    def build() -> list[str]:
        processor, stats, llm = fakes.fresh_classes()
        for owner in (processor, stats, llm):
            if name in owner.__dict__:
                delattr(owner, name)
        hooks = Hooks()
        missing = install(hooks, Lifecycle(lambda _: None), processor, stats, llm)
        assert hooks.installed == (
            name in ("propagate_error", "check_admission", "update_from_output")
        )
        return missing

    return build


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("add_request", "OutputProcessor.add_request"),
        ("_update_stats_from_finished", "OutputProcessor._update_stats_from_finished"),
        ("abort_requests", "OutputProcessor.abort_requests"),
        ("propagate_error", "OutputProcessor.propagate_error"),
        ("update_from_output", "IterationStats.update_from_output"),
        ("check_admission", "AsyncLLM.check_admission"),
    ],
)
def test_what_a_version_lacks_is_said(name: str, missing: str) -> None:
    assert without(name)() == [missing]


def test_gaps_where_req_stats_stand_elsewhere() -> None:
    """vLLM 0.12 passes prompt_len before req_stats."""
    processor, stats, llm = fakes.fresh_classes()

    def update_from_output(
        self: Any,
        output: Any,
        engine_core_timestamp: float,
        is_prefilling: bool,
        prompt_len: int,
        req_stats: Any,
        lora_states: Any,
        lora_name: str | None,
    ) -> None:
        req_stats.last_token_ts = engine_core_timestamp

    stats.update_from_output = update_from_output  # type: ignore[attr-defined]
    install(Hooks(), Lifecycle(lambda _: None), processor, stats, llm)
    seen = fakes.RequestStateStats()
    for number, prefilling in enumerate((True, False, False)):
        stats().update_from_output(None, 5.0 + number, prefilling, 10, seen, None, None)
    assert list(seen.servoscope_gaps.values) == [1.0, 1.0]  # type: ignore[attr-defined]


def test_samples_before_0_20_have_their_number_in_the_id() -> None:
    engine = Engine()
    parent = fakes.ParentRequest("chatcmpl-old", "")
    for index in range(2):
        engine.add(f"{index}_chatcmpl-old", "", parent)
        del engine.processor.request_states[f"{index}_chatcmpl-old"].external_req_id
    engine.run("0_chatcmpl-old")
    engine.run("1_chatcmpl-old")
    assert [m["request_id"] for m in engine.messages] == ["chatcmpl-old"]

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.vllm import fakes
from servoscope.exporters.records import Outcome, Phase
from servoscope.exporters.vllm.open_requests import estimated_phases
from servoscope.exporters.vllm.request_parts import (
    MAX_GAPS,
    Gaps,
    Part,
    endpoint_of,
    is_beam,
    merged,
    outcome_of_finish,
    part_of,
    response_id,
)


@pytest.mark.parametrize(
    ("external", "ident", "index", "endpoint"),
    [
        ("cmpl-foo-0", "cmpl-foo", 0, "/v1/completions"),
        ("cmpl-my-trace-7-12", "cmpl-my-trace-7", 12, "/v1/completions"),
        ("chatcmpl-foo-1", "chatcmpl-foo-1", None, "/v1/chat/completions"),
        ("embd-abc-3", "embd-abc", 3, "/v1/embeddings"),
        ("resp_1234", "resp_1234", None, "/v1/responses"),
        ("anything", "anything", None, None),
        ("cmpl-foo", "cmpl-foo", None, "/v1/completions"),
        ("", "", None, None),
    ],
)
def test_ids(external: str, ident: str, index: int | None, endpoint: str | None) -> None:
    assert response_id(external) == (ident, index)
    assert endpoint_of(ident) == endpoint


def test_beam_search_steps_are_known() -> None:
    assert is_beam("cmpl-foo-" + "0123456789abcdef" * 2 + "-beam-3")
    assert is_beam("beam_search-1")
    assert not is_beam("cmpl-foo-0")
    assert not is_beam("chatcmpl-my-beam-3")


def test_finish_reasons() -> None:
    assert outcome_of_finish("stop") is Outcome.COMPLETED
    assert outcome_of_finish("repetition") is Outcome.COMPLETED
    assert outcome_of_finish("abort") is Outcome.CANCELLED
    assert outcome_of_finish("error") is Outcome.ERROR
    assert outcome_of_finish("something new") is Outcome.UNKNOWN


def test_gaps_at_100_times_the_cap_keep_the_largest() -> None:
    gaps = Gaps()
    for number in range(100 * MAX_GAPS):
        gaps.add(number / 1000)
    assert len(gaps.values) == MAX_GAPS
    assert gaps.beyond == 99 * MAX_GAPS
    assert gaps.longest == (100 * MAX_GAPS - 1) / 1000


def state(**stats: float) -> fakes.RequestState:
    made = fakes.RequestState(fakes.EngineCoreRequest("i", "cmpl-x-0", 100.0), None)
    assert made.stats is not None
    for name, value in stats.items():
        setattr(made.stats, name, value)
    return made


def ended(made: fakes.RequestState, outcome: Outcome = Outcome.COMPLETED) -> Part:
    return part_of(made, outcome=outcome, phase=Phase.DECODE, finish_reason="stop", finished=110.0)


def test_intervals_are_those_of_vllms_own_histograms() -> None:
    made = state(
        num_generation_tokens=5,
        queued_ts=7.0,
        scheduled_ts=7.5,
        first_token_ts=8.0,
        last_token_ts=10.0,
        first_token_latency=1.25,
    )
    made.is_prefilling = False
    made.num_cached_tokens = 3
    message = merged([ended(made)], "cmpl-x", rank=0, estimated=False)
    assert message["queue_seconds"] == 0.5
    assert message["prefill_seconds"] == 0.5
    assert message["decode_seconds"] == 2.0
    assert message["inference_seconds"] == 2.5
    assert message["time_per_output_token_seconds"] == 0.5
    assert message["time_to_first_token_seconds"] == 1.25
    assert message["e2e_seconds"] == 10.0
    assert message["cached_tokens"] == 3
    assert message["streaming"] is True


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_time_per_output_token_below_two_tokens(tokens: int) -> None:
    made = state(num_generation_tokens=tokens, first_token_ts=8.0, last_token_ts=8.0)
    made.is_prefilling = False
    message = merged([ended(made)], "x", rank=0, estimated=False)
    assert message["time_per_output_token_seconds"] is None


def test_a_request_that_never_had_a_token_has_no_first_token() -> None:
    message = merged([ended(state(queued_ts=5.0))], "x", rank=0, estimated=True)
    for name in ("time_to_first_token_seconds", "decode_seconds", "queue_seconds"):
        assert message[name] is None
    assert message["output_tokens"] == 0
    assert message["cached_tokens"] is None


def test_embeddings_are_pooling() -> None:
    made = state(queued_ts=5.0, scheduled_ts=5.5)
    made.detokenizer, made.is_prefilling, made.output_kind = (
        None,
        False,
        fakes.OutputKind.FINAL_ONLY,
    )
    part = ended(made)
    assert part.pooling
    assert part.first_token is None
    assert part.streaming is False


def part(**values: object) -> Part:
    base: dict[str, object] = {
        "outcome": Outcome.COMPLETED,
        "phase": Phase.DECODE,
        "finish_reason": "stop",
        "received": 0.0,
        "finished": 10.0,
    }
    return Part(**(base | values))  # type: ignore[arg-type]


def test_samples_of_one_prompt_count_the_prompt_once() -> None:
    parts = [
        part(first_token=2.0, decode=4.0, output_tokens=5, prompt_tokens=10, cached_tokens=0),
        part(first_token=3.0, decode=6.0, output_tokens=4, prompt_tokens=10, cached_tokens=8),
    ]
    message = merged(parts, "chatcmpl-x", rank=1, estimated=False)
    assert (message["prompt_tokens"], message["output_tokens"]) == (10, 9)
    assert message["cached_tokens"] == 8  # as of the last one to finish
    assert (message["choices"], message["prompts"]) == (2, 1)
    assert message["time_to_first_token_seconds"] == 2.0
    assert message["time_per_output_token_seconds"] == (4.0 + 6.0) / (4 + 3)
    assert message["decode_seconds"] == 7.0  # 2.0 .. 9.0


def test_prompts_of_a_list_add_up_and_the_worst_end_wins() -> None:
    parts = [
        part(prompt_index=0, prompt_tokens=10, outcome=Outcome.LENGTH),
        part(prompt_index=1, prompt_tokens=20, outcome=Outcome.CLIENT_DISCONNECT),
        part(prompt_index=2, prompt_tokens=30),
    ]
    message = merged(parts, "cmpl-x", rank=None, estimated=False)
    assert message["prompt_tokens"] == 60
    assert message["outcome"] == "client_disconnect"
    assert (message["choices"], message["prompts"]) == (1, 3)


@given(st.lists(st.integers(0, 2 * MAX_GAPS), min_size=1, max_size=4))
def test_merged_gaps_stay_bounded_and_none_is_uncounted(lengths: list[int]) -> None:
    parts = []
    for length in lengths:
        gaps = Gaps()
        for number in range(length):
            gaps.add(float(number))
        parts.append(part(gaps=gaps))
    message = merged(parts, "x", rank=0, estimated=False)
    assert len(message["inter_token_seconds"]) <= MAX_GAPS
    assert len(message["inter_token_seconds"]) + message["inter_token_beyond"] == sum(lengths)
    assert message["max_inter_token_seconds"] == float(
        max(0, *lengths, 0) - 1 if any(lengths) else 0
    )


def test_no_text_in_a_message() -> None:
    made = state(num_generation_tokens=2)
    made.prompt = "SECRET prompt"  # type: ignore[attr-defined]
    made.detokenizer = SimpleNamespace(output_text="SECRET answer")
    message = merged([ended(made)], "x", rank=0, estimated=False)
    assert "SECRET" not in repr(message)
    assert isinstance(message["inter_token_seconds"], array)


REQUESTS = st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30)


@given(REQUESTS, st.integers(0, 40), st.floats(0, 120))
def test_phases(requests: list[tuple[float, bool]], waiting: int, at: float) -> None:
    found = estimated_phases(requests, waiting, at)
    assert len(found) == len(requests)
    for (arrival, token), phase in zip(requests, found, strict=True):
        assert (phase is Phase.DECODE) == token
        if not token and waiting == 0 and arrival <= at:
            assert phase is Phase.PREFILL
        if not token and waiting >= len(requests):
            assert phase is Phase.QUEUED


def test_the_youngest_wait() -> None:
    requests = [(3.0, False), (1.0, False), (2.0, False), (0.5, True), (9.0, False)]
    assert estimated_phases(requests, 1, 5.0) == [
        Phase.QUEUED,
        Phase.PREFILL,
        Phase.PREFILL,
        Phase.DECODE,
        Phase.QUEUED,  # came after the last step: waits for the one that runs
    ]
    assert estimated_phases([(9.0, False)], 0, 5.0) == [Phase.PREFILL]  # the engine idled

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.vllm.knob_set import KNOB_UNITS, KnobEnvelope, KnobSet

BOOT = KnobSet(2048, 0, 64)
ENVELOPES = st.builds(
    KnobEnvelope,
    boot=st.builds(KnobSet, st.integers(64, 32768), st.integers(0, 4096), st.integers(1, 1024)),
    speculative_tokens=st.integers(0, 8),
    floor_tokens=st.integers(1, 256),
)
NUMBERS = (
    st.integers(-10, 70000)
    | st.floats()
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
    | st.just(1 << 80)
)
CHANGES = st.dictionaries(st.sampled_from([*KNOB_UNITS, "nonsense"]), NUMBERS, max_size=6)


@given(ENVELOPES, CHANGES, st.integers(0, 2000))
def test_whatever_is_asked_the_envelope_holds(
    envelope: KnobEnvelope, changes: dict[str, object], running: int
) -> None:
    boot = envelope.boot
    refusal: KnobRefusedError | None = None
    values = boot
    try:
        values = envelope.changed(boot, changes, running)
    except KnobRefusedError as refused:
        refusal = refused
    if refusal is not None:
        assert refusal.name in changes
        assert f"{refusal.name}={refusal.value!r}: " in str(refusal)
        return
    assert 1 <= values.chunk_tokens <= boot.chunk_tokens
    assert 1 <= values.max_running_requests <= boot.max_running_requests
    assert 0 <= values.batch_window_seconds <= 1.0
    assert (
        0
        <= values.long_prefill_threshold_tokens
        <= max(boot.chunk_tokens, boot.long_prefill_threshold_tokens)
    )
    for name, value in changes.items():
        assert getattr(values, name) == value  # never silently another value


@given(ENVELOPES, st.integers(1, 40000), st.integers(0, 3000))
def test_budget_has_room_for_every_running_request(
    envelope: KnobEnvelope, chunk: int, running: int
) -> None:
    values = replace(envelope.boot, chunk_tokens=chunk)
    budget = envelope.budget(values, running)
    assert budget <= envelope.boot.chunk_tokens
    need = running * (1 + envelope.speculative_tokens)
    assert budget > need or budget == envelope.boot.chunk_tokens


@given(ENVELOPES, st.integers(1, 2000), st.integers(0, 1024))
def test_asserted_slots_are_never_below_running(
    envelope: KnobEnvelope, wanted: int, running: int
) -> None:
    running = min(running, envelope.boot.max_running_requests)
    values = replace(envelope.boot, max_running_requests=wanted)
    slots = envelope.slots(values, running, asserted=True)
    assert running <= slots <= envelope.boot.max_running_requests
    assert slots >= 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chunk_tokens": 4096}, "chunk_tokens=4096: above the value at boot, 2048"),
        ({"chunk_tokens": 16}, "chunk_tokens=16: below 21: 20 running requests"),
        ({"chunk_tokens": 100.5}, "not a whole number"),
        ({"chunk_tokens": True}, "not a number"),
        ({"chunk_tokens": float("nan")}, "not a finite number"),
        ({"chunk_tokens": 10**400}, "not a finite number"),
        ({"batch_window_seconds": -(10**400)}, "not a finite number"),
        ({"max_running_requests": 0}, "max_running_requests=0: below 1"),
        ({"batch_window_seconds": 1.5}, "batch_window_seconds=1.5: above the cap, 1"),
        ({"long_prefill_threshold_tokens": 3}, "below 16 and not 0"),
        ({"turbo": 1}, "no such knob; knobs: chunk_tokens"),
    ],
)
def test_refusals_name_knob_value_and_bound(changes: dict[str, object], text: str) -> None:
    with pytest.raises(KnobRefusedError, match=r".") as caught:
        KnobEnvelope(boot=BOOT).changed(BOOT, changes, 20)
    assert text in str(caught.value)


def test_chunk_is_refused_where_prefill_is_not_chunked_but_its_boot_value_is_not() -> None:
    envelope = KnobEnvelope(boot=BOOT, refused={"chunk_tokens": "chunked prefill is off"})
    with pytest.raises(KnobRefusedError, match="chunked prefill is off"):
        envelope.changed(BOOT, {"chunk_tokens": 256}, 0)
    assert envelope.changed(BOOT, {"chunk_tokens": 2048}, 0) == BOOT

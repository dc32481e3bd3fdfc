from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.vllm.knob_state import (
    KNOB_UNITS,
    MAX_LEASE_SECONDS,
    BatchWindow,
    Envelope,
    KnobLaw,
    KnobRefusedError,
    KnobValues,
    LeaseError,
)

BOOT = KnobValues(2048, 0, 64)
ENVELOPES = st.builds(
    Envelope,
    boot=st.builds(KnobValues, st.integers(64, 32768), st.integers(0, 4096), st.integers(1, 1024)),
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
    envelope: Envelope, changes: dict[str, object], running: int
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
    envelope: Envelope, chunk: int, running: int
) -> None:
    values = replace(envelope.boot, chunk_tokens=chunk)
    budget = envelope.budget(values, running)
    assert budget <= envelope.boot.chunk_tokens
    need = running * (1 + envelope.speculative_tokens)
    assert budget > need or budget == envelope.boot.chunk_tokens


@given(ENVELOPES, st.integers(1, 2000), st.integers(0, 1024))
def test_asserted_slots_are_never_below_running(
    envelope: Envelope, wanted: int, running: int
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
        ({"max_running_requests": 0}, "max_running_requests=0: below 1"),
        ({"batch_window_seconds": 1.5}, "batch_window_seconds=1.5: above the cap, 1"),
        ({"long_prefill_threshold_tokens": 3}, "below 16 and not 0"),
        ({"turbo": 1}, "no such knob; knobs: chunk_tokens"),
    ],
)
def test_refusals_name_knob_value_and_bound(changes: dict[str, object], text: str) -> None:
    with pytest.raises(KnobRefusedError, match=r".") as caught:
        Envelope(boot=BOOT).changed(BOOT, changes, 20)
    assert text in str(caught.value)


def test_one_bad_value_changes_nothing() -> None:
    law = KnobLaw(Envelope(boot=BOOT))
    law.lease("me", 30, 0.0)
    with pytest.raises(KnobRefusedError):
        law.set("me", {"chunk_tokens": 256, "max_running_requests": 999}, 1.0, 0)
    assert law.target.values == BOOT


def test_chunk_is_refused_where_prefill_is_not_chunked_but_its_boot_value_is_not() -> None:
    envelope = Envelope(boot=BOOT, refused={"chunk_tokens": "chunked prefill is off"})
    with pytest.raises(KnobRefusedError, match="chunked prefill is off"):
        envelope.changed(BOOT, {"chunk_tokens": 256}, 0)
    assert envelope.changed(BOOT, {"chunk_tokens": 2048}, 0) == BOOT


def test_lease_runs_out_after_30_seconds_unless_renewed() -> None:
    law = KnobLaw(Envelope(boot=BOOT))
    assert law.lease("me", 3600, 0.0) == MAX_LEASE_SECONDS
    law.set("me", {"chunk_tokens": 256}, 1.0, 0)
    law.renew("me", 20.0)
    assert law.target.deadline == 50.0
    assert law.target.live(49.9)
    assert not law.target.live(50.0)  # the engine's thread sees it without the socket's thread
    assert not law.expire(49.9)
    assert law.expire(50.0)
    assert law.target.values == BOOT
    assert law.target.deadline is None
    assert law.expired_total == 1
    with pytest.raises(LeaseError, match="no lease"):
        law.set("me", {"chunk_tokens": 256}, 51.0, 0)


def test_only_the_holder_sets_and_anybody_may_follow_him() -> None:
    law = KnobLaw(Envelope(boot=BOOT))
    law.lease("me", 10, 0.0)
    with pytest.raises(LeaseError, match=r"held by me for another 7\.0 s"):
        law.lease("you", 10, 3.0)
    with pytest.raises(LeaseError, match="held by me"):
        law.set("you", {"chunk_tokens": 256}, 3.0, 0)
    law.set("me", {"chunk_tokens": 256}, 3.0, 0)
    law.lease("me", 10, 8.0)  # a restarted owner takes its own lease over, settings stay
    assert law.target.values.chunk_tokens == 256
    assert law.target.deadline == 18.0
    law.lease("you", 10, 18.0)
    assert law.target.values == BOOT
    assert law.holder(19.0) == ("you", 9.0)
    law.release("you", 20.0)
    assert law.holder(20.0) is None


def test_release_and_bypass() -> None:
    law = KnobLaw(Envelope(boot=BOOT))
    law.lease("me", 10, 0.0)
    law.bypass("me", True, 1.0)
    assert law.target.bypass
    assert law.target.deadline == 10.0
    law.bypass("me", False, 2.0)
    law.set("me", {"max_running_requests": 4}, 2.0, 0)
    law.release("me", 3.0)
    assert law.target.values == BOOT
    assert not law.target.bypass


@pytest.mark.parametrize("ttl", [float("nan"), float("inf"), "soon", None])
def test_a_nonsense_lease_is_refused(ttl: object) -> None:
    with pytest.raises(LeaseError, match="ttl_s"):
        KnobLaw(Envelope(boot=BOOT)).lease("me", ttl, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("owner", ["", "x" * 201])
def test_an_owner_has_a_name(owner: str) -> None:
    with pytest.raises(LeaseError, match="owner"):
        KnobLaw(Envelope(boot=BOOT)).lease(owner, 10, 0.0)


WINDOW = replace(BOOT, batch_window_seconds=0.25)


def test_window_opens_at_an_empty_queue_and_ends_by_time() -> None:
    window = BatchWindow()
    window.arrived(10.0, 0, WINDOW)
    assert window.holds(10.0, 1, WINDOW)
    window.arrived(10.1, 1, WINDOW)
    assert window.holds(10.24, 2, WINDOW)
    assert not window.holds(10.25, 2, WINDOW)
    window.arrived(10.3, 1, WINDOW)  # still a queue: no new window, nobody waits twice
    assert not window.holds(10.3, 2, WINDOW)


def test_window_ends_with_enough_requests_or_none() -> None:
    values = replace(WINDOW, batch_window_min_requests=3)
    window = BatchWindow()
    window.arrived(0.0, 0, values)
    window.arrived(0.01, 1, values)
    assert window.holds(0.02, 2, values)
    window.arrived(0.03, 2, values)
    assert not window.holds(0.03, 3, values)
    window.arrived(1.0, 0, values)
    assert not window.holds(1.01, 0, values)  # the client went away


def test_preempted_requests_are_not_held() -> None:
    window = BatchWindow()
    window.arrived(0.0, 0, WINDOW)
    assert not window.holds(0.01, 2, WINDOW)  # two wait, one arrived: the other was preempted


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 0.2)), min_size=1, max_size=60),
    st.floats(0, 5),
    st.integers(0, 5),
)
def test_nobody_is_ever_held_longer_than_the_cap(
    events: list[tuple[bool, float]], seconds: float, least: int
) -> None:
    values = replace(BOOT, batch_window_seconds=seconds, batch_window_min_requests=least)
    window, now = BatchWindow(), 0.0
    waiting: list[float] = []
    for arrives, pause in events:
        now += pause
        if arrives:
            window.arrived(now, len(waiting), values)
            waiting.append(now)
        if not window.holds(now, len(waiting), values):
            waiting.clear()
        assert all(now - came < 1.0 for came in waiting)

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.sglang.knob_set import KNOB_UNITS, KnobEnvelope, KnobSet

BOOT = KnobSet(2048, 0, 0, 16)


def envelope(boot: KnobSet = BOOT, **more: Any) -> KnobEnvelope:
    return KnobEnvelope(boot=boot, **more)


def test_a_chunk_below_boot_takes_the_interval_with_it_and_gives_it_back() -> None:
    law = envelope()
    small = law.changed(BOOT, {"chunk_tokens": 512})
    assert (small.chunk_tokens, small.prefill_decode_interval) == (512, 1)
    assert law.changed(small, {"chunk_tokens": 256}).prefill_decode_interval == 1
    assert law.changed(small, {"chunk_tokens": 2048}) == BOOT


def test_an_interval_that_was_asked_for_stays() -> None:
    law = envelope()
    both = law.changed(BOOT, {"chunk_tokens": 512, "prefill_decode_interval": 4})
    assert both.prefill_decode_interval == 4
    assert law.changed(both, {"chunk_tokens": 2048}).prefill_decode_interval == 4
    small = law.changed(BOOT, {"chunk_tokens": 512})
    asked = law.changed(small, {"prefill_decode_interval": 2})
    assert law.changed(asked, {"chunk_tokens": 2048}).prefill_decode_interval == 2
    again = law.changed(small, {"prefill_decode_interval": 1})  # no change: still the added one
    assert law.changed(again, {"chunk_tokens": 2048}) == BOOT


def test_mixed_chunk_needs_no_interval_until_it_is_turned_off() -> None:
    mixed = KnobSet(2048, 0, 1, 16)
    law = envelope(mixed)
    small = law.changed(mixed, {"chunk_tokens": 512})
    assert small.prefill_decode_interval == 0
    with pytest.raises(KnobRefusedError, match="mixed_chunk=0: chunk_tokens 512 is below boot"):
        law.changed(small, {"mixed_chunk": 0})
    off = law.changed(small, {"mixed_chunk": 0, "prefill_decode_interval": 1})
    assert (off.mixed_chunk, off.prefill_decode_interval) == (0, 1)
    together = law.changed(mixed, {"mixed_chunk": 0, "chunk_tokens": 512})
    assert together.prefill_decode_interval == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 512, "prefill_decode_interval": 0},
        {"prefill_decode_interval": 0},
    ],
)
def test_the_combination_that_harms_is_refused(changes: dict[str, float]) -> None:
    small = envelope().changed(BOOT, {"chunk_tokens": 512})
    with pytest.raises(KnobRefusedError, match="smaller chunks make decode wait longer"):
        envelope().changed(small, changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"chunk_tokens": 4096}, "above the value at boot, 2048"),
        ({"chunk_tokens": 16}, "below 64"),
        ({"chunk_tokens": 100}, "not a multiple of 64.*: 64 or 128"),
        ({"chunk_tokens": 65}, "not a multiple of 64.*: 64 or 128"),
        ({"chunk_tokens": 512.5}, "not a whole number"),
        ({"chunk_tokens": True}, "not a number"),
        ({"chunk_tokens": math.nan}, "not a finite number"),
        ({"chunk_tokens": 10**400}, "not a finite number"),
        ({"batch_window_seconds": 10**400}, "not a finite number"),
        ({"chunk_tokens": "512"}, "not a number"),
        ({"prefill_decode_interval": 65}, "above the cap, 64"),
        ({"prefill_decode_interval": -1}, "below 0"),
        ({"max_running_requests": 17}, "above the value at boot, 16"),
        ({"max_running_requests": 0}, "below 1"),
        ({"batch_window_seconds": 1.5}, "above the cap, 1"),
        ({"mixed_chunk": 1}, "off at boot"),
        ({"long_prefill_threshold_tokens": 64}, "no such knob; knobs: chunk_tokens"),
    ],
)
def test_what_is_out_of_the_envelope_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    law = envelope(chunk_floor=64, chunk_multiple=64, refused={"mixed_chunk": "off at boot"})
    (name,) = changes
    with pytest.raises(KnobRefusedError, match=why) as refused:
        law.changed(BOOT, changes)
    assert refused.value.name == name


def test_the_boot_value_is_allowed_of_a_knob_that_is_refused() -> None:
    law = envelope(refused={"chunk_tokens": "off"})
    assert law.changed(BOOT, {"chunk_tokens": 2048}) == BOOT


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(sorted(KNOB_UNITS)),
            st.one_of(st.integers(-2, 5000), st.floats(), st.booleans()),
            min_size=1,
            max_size=3,
        ),
        max_size=8,
    ),
    st.integers(0, 1),
)
def test_whatever_is_asked_for_the_set_stays_inside_and_never_harms(
    asked: list[dict[str, Any]], mixed: int
) -> None:
    boot = KnobSet(2048, 0, mixed, 16)
    law = envelope(boot, chunk_floor=32, chunk_multiple=16)
    values = boot
    for changes in asked:
        with contextlib.suppress(KnobRefusedError):  # then nothing of it is set
            values = law.changed(values, changes)
        assert 32 <= values.chunk_tokens <= 2048
        assert values.chunk_tokens % 16 == 0
        assert 0 <= values.batch_window_seconds <= 1
        assert 1 <= values.max_running_requests <= 16
        if values.chunk_tokens < 2048:
            assert values.prefill_decode_interval >= 1 or values.mixed_chunk
        told = KnobSet.from_json(values.as_json())
        assert told.as_json() == values.as_json()

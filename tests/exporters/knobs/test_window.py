from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.knobs.window import BatchWindow
from servoscope.exporters.vllm.knob_set import KnobSet

BOOT = KnobSet(2048, 0, 64)
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

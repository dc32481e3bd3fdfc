from __future__ import annotations

from servoscope.exporters.knobs.step_counters import StepCounters


def test_the_largest_step_is_not_lost_between_two_reads() -> None:
    counters = StepCounters()
    window = counters._now
    assert counters.take_step_tokens_max() == 0
    # The engine's thread held the old window while it was swapped, and writes into it only now.
    window.step_tokens_max = 777
    assert counters.take_step_tokens_max() == 777
    assert counters.take_step_tokens_max() == 0


def test_counters() -> None:
    counters = StepCounters()
    counters.stepped(10, 1000, held=False)
    counters.stepped(0, 500, held=True)
    assert counters.as_json() == {
        "steps": 1,
        "empty_steps": 1,
        "held_steps": 1,
        "scheduled_tokens": 10,
        "scheduler_cpu_seconds": 1.5e-6,
        "plugin_cpu_seconds": 0.0,
    }

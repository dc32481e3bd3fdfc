"""What a scheduler did since boot: steps, tokens, CPU, and the largest step since the last read."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepCounters", "Steps"]


@dataclass(slots=True)
class Steps:
    """Largest step since this object was put in place. Replaced, never reset (no lock)."""

    step_tokens_max: int = 0


class StepCounters:
    """What the scheduler did. Written by the engine's thread, read by the socket's."""

    def __init__(self) -> None:
        self.steps = 0
        self.empty_steps = 0
        self.held_steps = 0
        self.scheduled_tokens = 0
        self.scheduler_cpu_ns = 0
        self.plugin_cpu_ns = 0
        self._now = Steps()
        self._before = Steps()
        self._before_seen = 0

    def stepped(self, tokens: int, cpu_ns: int, *, held: bool) -> None:
        """One call of schedule."""
        if tokens > 0:
            self.steps += 1
            self.scheduled_tokens += tokens
            window = self._now
            window.step_tokens_max = max(window.step_tokens_max, tokens)
        else:
            self.empty_steps += 1
        if held:
            self.held_steps += 1
        self.scheduler_cpu_ns += cpu_ns

    def take_step_tokens_max(self) -> int:
        """Largest step since the last call. A step that ends meanwhile is seen by the next one."""
        late = self._before.step_tokens_max
        late = late if late > self._before_seen else 0
        self._before, self._now = self._now, Steps()
        self._before_seen = self._before.step_tokens_max
        return max(late, self._before_seen)

    def as_json(self) -> dict[str, float]:
        """Totals since boot."""
        return {
            "steps": self.steps,
            "empty_steps": self.empty_steps,
            "held_steps": self.held_steps,
            "scheduled_tokens": self.scheduled_tokens,
            "scheduler_cpu_seconds": self.scheduler_cpu_ns / 1e9,
            "plugin_cpu_seconds": self.plugin_cpu_ns / 1e9,
        }

"""The knobs of vLLM as a set: what may be set, within what the engine was booted with.

Pure: numbers in, values out. Lease and deadline are every engine's (knobs.law).

Rules
1. The values at boot are ceilings: buffers and graphs are sized from them. Only down from there.
2. A step must have room for every running request: budget > running x (1 + speculative tokens),
   else the last requests of the batch never decode. The floor moves with ``running``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from servoscope.exporters.knobs.bounds import Envelope
from servoscope.exporters.knobs.window import MAX_WINDOW_SECONDS

__all__ = ["KNOB_UNITS", "KnobEnvelope", "KnobSet"]

#: Below one KV block a long-prefill limit only adds steps.
MIN_LONG_PREFILL_TOKENS = 16

KNOB_UNITS: Mapping[str, str] = {
    "chunk_tokens": "tokens",
    "long_prefill_threshold_tokens": "tokens",
    "max_running_requests": "requests",
    "batch_window_seconds": "seconds",
    "batch_window_min_requests": "requests",
}


@dataclass(frozen=True, slots=True)
class KnobSet:
    """One setting of all knobs."""

    chunk_tokens: int
    long_prefill_threshold_tokens: int
    max_running_requests: int
    batch_window_seconds: float = 0.0
    batch_window_min_requests: int = 0

    def as_json(self) -> dict[str, float]:
        """The values by knob name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEnvelope(Envelope[KnobSet]):
    """What vLLM was started with."""

    speculative_tokens: int = 0
    floor_tokens: int = 1  # least budget this model can be scheduled with (Mamba block)

    def least_chunk(self, running: int) -> int:
        """Rule 2 for this many running requests, never above the boot value."""
        need = max(running, 1) * (1 + self.speculative_tokens) + 1
        return min(max(need, self.floor_tokens), self.boot.chunk_tokens)

    def limits(self, running: int) -> dict[str, tuple[float, float]]:
        """Least and largest value of every knob while ``running`` requests are in the batch."""
        boot = self.boot
        return {
            "chunk_tokens": (self.least_chunk(running), boot.chunk_tokens),
            "long_prefill_threshold_tokens": (0, boot.chunk_tokens),
            "max_running_requests": (1, boot.max_running_requests),
            "batch_window_seconds": (0.0, MAX_WINDOW_SECONDS),
            "batch_window_min_requests": (0, boot.max_running_requests),
        }

    def _floor_is(self, name: str, running: int) -> str:
        if name != "chunk_tokens":
            return ""
        return (
            f": {running} running requests x (1 + {self.speculative_tokens} speculative tokens)"
            f" must fit into a step, and this model needs {self.floor_tokens}"
        )

    def _unfit(self, name: str, number: float) -> str:
        if name == "long_prefill_threshold_tokens" and 0 < number < MIN_LONG_PREFILL_TOKENS:
            return f"below {MIN_LONG_PREFILL_TOKENS} and not 0 (off)"
        return ""

    def budget(self, values: KnobSet, running: int) -> int:
        """Tokens of the next step: the set value, lifted to the floor, within the envelope."""
        lifted = max(values.chunk_tokens, self.least_chunk(running))
        return min(lifted, self.boot.chunk_tokens)

    def slots(self, values: KnobSet, running: int, *, asserted: bool) -> int:
        """Requests that may run. ``asserted``: the scheduler dies if it is below ``running``."""
        low = max(1, running) if asserted else 1
        return min(max(values.max_running_requests, low), self.boot.max_running_requests)

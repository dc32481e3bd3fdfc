"""The knobs of SGLang as a set: what may be set together, within what the engine was booted with.

Pure: numbers in, values out. Lease and deadline are every engine's (knobs.law).

Rules
1. The values at boot are ceilings where memory and graphs are sized from them (chunk, running
   requests). ``prefill_decode_interval`` sizes nothing and may go up.
2. A chunk is a multiple of the page, and at least the alignment that this model truncates to:
   below it a longer prompt would wait for ever.
3. SGLang prefills first: smaller chunks alone make decode wait longer, not shorter (measured; see
   docs/engines.md). So a chunk below boot goes with ``prefill_decode_interval`` of at least 1 or
   with mixed chunk. Who sets the chunk alone gets the interval with it, and is told so; who asks
   for the combination that harms is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from servoscope.exporters.knobs.bounds import Envelope, KnobRefusedError, knob_number
from servoscope.exporters.knobs.window import MAX_WINDOW_SECONDS

__all__ = ["KNOB_UNITS", "MAX_INTERVAL", "KnobEnvelope", "KnobSet"]

#: Decode rounds between two prefills. More would starve prompts for seconds.
MAX_INTERVAL = 64

KNOB_UNITS: Mapping[str, str] = {
    "chunk_tokens": "tokens",
    "prefill_decode_interval": "steps",
    "mixed_chunk": "1",
    "max_running_requests": "requests",
    "batch_window_seconds": "seconds",
    "batch_window_min_requests": "requests",
}


@dataclass(frozen=True, slots=True)
class KnobSet:
    """One setting of all knobs. ``interval_added``: rule 3 added the interval, nobody asked."""

    chunk_tokens: int  # 0: chunking is off
    prefill_decode_interval: int
    mixed_chunk: int  # 0 or 1
    max_running_requests: int
    batch_window_seconds: float = 0.0
    batch_window_min_requests: int = 0
    interval_added: bool = False

    def as_json(self) -> dict[str, float]:
        """The values by knob name."""
        return {name: getattr(self, name) for name in KNOB_UNITS}

    @classmethod
    def from_json(cls, values: Mapping[str, float]) -> KnobSet:
        """Of ``as_json``. Raises KeyError, KnobRefusedError."""
        told: dict[str, Any] = {name: knob_number(name, values[name]) for name in KNOB_UNITS}
        return cls(**told)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEnvelope(Envelope[KnobSet]):
    """What SGLang was started with."""

    chunk_floor: int = 1
    chunk_multiple: int = 1

    def limits(self, _running: int) -> dict[str, tuple[float, float]]:
        """Least and largest value of every knob."""
        boot = self.boot
        return {
            "chunk_tokens": (min(self.chunk_floor, boot.chunk_tokens), boot.chunk_tokens),
            "prefill_decode_interval": (0, max(MAX_INTERVAL, boot.prefill_decode_interval)),
            "mixed_chunk": (0, 1),
            "max_running_requests": (1, boot.max_running_requests),
            "batch_window_seconds": (0.0, boot.batch_window_seconds or MAX_WINDOW_SECONDS),
            "batch_window_min_requests": (0, boot.max_running_requests),
        }

    def _unfit(self, name: str, number: float) -> str:
        if name != "chunk_tokens" or not number % self.chunk_multiple:
            return ""
        lower = int(number - number % self.chunk_multiple)
        return (
            f"not a multiple of {self.chunk_multiple}, the page size of the KV cache:"
            f" {max(lower, self.chunk_floor)} or {lower + self.chunk_multiple}"
        )

    def _together(self, current: KnobSet, wanted: KnobSet, asked: Mapping[str, object]) -> KnobSet:
        """Rule 3. The value it has already, asked for again (a rollback does), changes nothing."""
        small = 0 < wanted.chunk_tokens < self.boot.chunk_tokens and not wanted.mixed_chunk
        same = wanted.prefill_decode_interval == current.prefill_decode_interval
        added = wanted.interval_added and same
        if small and wanted.prefill_decode_interval < 1:
            if "chunk_tokens" not in asked or "prefill_decode_interval" in asked:
                name = next(iter(asked.keys() & {"prefill_decode_interval", "mixed_chunk"}))
                raise KnobRefusedError(
                    name,
                    asked[name],
                    f"chunk_tokens {wanted.chunk_tokens} is below boot"
                    f" ({self.boot.chunk_tokens}): without prefill_decode_interval >= 1 or mixed"
                    " chunk, smaller chunks make decode wait longer",
                )
            return replace(wanted, prefill_decode_interval=1, interval_added=True)
        if added and not small:
            boot = self.boot.prefill_decode_interval
            return replace(wanted, prefill_decode_interval=boot, interval_added=False)
        return replace(wanted, interval_added=added)

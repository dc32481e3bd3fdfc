"""The knobs of SGLang as a set: what may be set together, within what the engine was booted with.

Pure: numbers in, values out. Lease and deadline are every engine's (vllm.knob_state.KnobLaw).

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
from dataclasses import dataclass, field, replace
from typing import Any

from servoscope.exporters.vllm.knob_state import (
    MAX_WINDOW_SECONDS,
    Bound,
    KnobRefusedError,
    knob_number,
)

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
        """Of ``as_json``. Raises KeyError."""
        return cls(
            chunk_tokens=int(values["chunk_tokens"]),
            prefill_decode_interval=int(values["prefill_decode_interval"]),
            mixed_chunk=int(values["mixed_chunk"]),
            max_running_requests=int(values["max_running_requests"]),
            batch_window_seconds=float(values["batch_window_seconds"]),
            batch_window_min_requests=int(values["batch_window_min_requests"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEnvelope:
    """What the engine was started with. ``refused`` says of a knob why this engine has it not."""

    boot: KnobSet
    chunk_floor: int = 1
    chunk_multiple: int = 1
    refused: Mapping[str, str] = field(default_factory=dict)

    def bounds(self) -> dict[str, Bound]:
        """Bounds of every knob."""
        boot = self.boot
        plain = {
            "chunk_tokens": (min(self.chunk_floor, boot.chunk_tokens), boot.chunk_tokens),
            "prefill_decode_interval": (0, max(MAX_INTERVAL, boot.prefill_decode_interval)),
            "mixed_chunk": (0, 1),
            "max_running_requests": (1, boot.max_running_requests),
            "batch_window_seconds": (0.0, boot.batch_window_seconds or MAX_WINDOW_SECONDS),
            "batch_window_min_requests": (0, boot.max_running_requests),
        }
        return {
            name: Bound(low, high, self.refused.get(name, ""))
            for name, (low, high) in plain.items()
        }

    def changed(
        self, current: KnobSet, changes: Mapping[str, object], _running: int = 0
    ) -> KnobSet:
        """``current`` with ``changes``, all or nothing. Raises KnobRefusedError."""
        bounds = self.bounds()
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in bounds:
                raise KnobRefusedError(name, value, f"no such knob; knobs: {', '.join(bounds)}")
            accepted[name] = self._checked(name, value, bounds[name])
        return self._together(current, replace(current, **accepted), accepted)

    def _checked(self, name: str, value: object, bound: Bound) -> float:
        number = knob_number(name, value)
        if number == getattr(self.boot, name):
            return number  # the boot value is always allowed, also of a knob that is refused
        if bound.why:
            raise KnobRefusedError(name, value, bound.why)
        if number > bound.maximum:
            at_boot = bound.maximum == getattr(self.boot, name)
            limit = "the value at boot" if at_boot else "the cap"
            raise KnobRefusedError(name, value, f"above {limit}, {bound.maximum:g}")
        if number < bound.minimum:
            raise KnobRefusedError(name, value, f"below {bound.minimum:g}")
        if name == "chunk_tokens" and number % self.chunk_multiple:
            lower = number - number % self.chunk_multiple
            raise KnobRefusedError(
                name,
                value,
                f"not a multiple of {self.chunk_multiple}, the page size of the KV cache:"
                f" {max(lower, self.chunk_floor)} or {lower + self.chunk_multiple}",
            )
        return number

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

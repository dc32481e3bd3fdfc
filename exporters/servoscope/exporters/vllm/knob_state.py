"""The law of the knobs inside a vLLM scheduler: what may be set, by whom, for how long.

Pure: numbers and ``now`` (monotonic seconds) in, values out. The engine's thread only reads
``KnobLaw.target``, one immutable object that the socket's thread replaces; no lock is shared.

Rules
1. The values at boot are ceilings: buffers and graphs are sized from them. Only down from there.
2. A step must have room for every running request: budget > running x (1 + speculative tokens),
   else the last requests of the batch never decode. The floor moves with ``running``.
3. Only the lease holder sets. A lease not renewed within its time (30 s at most) puts everything
   back to the boot values; the target carries its own deadline, so a stuck socket thread cannot
   keep a setting alive.
4. A batch window holds admission for ``batch_window_seconds`` at most (1 s cap), counted from the
   first request that arrived at an empty queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = [
    "KNOB_UNITS",
    "MAX_LEASE_SECONDS",
    "BatchWindow",
    "Bound",
    "Envelope",
    "KnobLaw",
    "KnobRefusedError",
    "KnobValues",
    "LeaseError",
    "Target",
    "knob_number",
]

MAX_LEASE_SECONDS = 30.0
MAX_WINDOW_SECONDS = 1.0
#: Below one KV block a long-prefill limit only adds steps.
MIN_LONG_PREFILL_TOKENS = 16

KNOB_UNITS: Mapping[str, str] = {
    "chunk_tokens": "tokens",
    "long_prefill_threshold_tokens": "tokens",
    "max_running_requests": "requests",
    "batch_window_seconds": "seconds",
    "batch_window_min_requests": "requests",
}


class KnobRefusedError(ValueError):
    """A value that is not set: which knob, which value, and the bound it broke."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name[:80]}={repr(value)[:80]}: {why}")
        self.name = name
        self.value = value
        self.why = why


class LeaseError(PermissionError):
    """Somebody else holds the lease, or nobody does."""


@dataclass(frozen=True, slots=True)
class KnobValues:
    """One setting of all knobs."""

    chunk_tokens: int
    long_prefill_threshold_tokens: int
    max_running_requests: int
    batch_window_seconds: float = 0.0
    batch_window_min_requests: int = 0

    def as_json(self) -> dict[str, float]:
        """The values by knob name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a knob may be now. ``why`` is not empty when it cannot be set at all."""

    minimum: float
    maximum: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What the engine was started with. ``refused`` says of a knob why this engine has it not."""

    boot: KnobValues
    speculative_tokens: int = 0
    floor_tokens: int = 1  # least budget this model can be scheduled with (Mamba block)
    refused: Mapping[str, str] = field(default_factory=dict)

    def least_chunk(self, running: int) -> int:
        """Rule 2 for this many running requests, never above the boot value."""
        need = max(running, 1) * (1 + self.speculative_tokens) + 1
        return min(max(need, self.floor_tokens), self.boot.chunk_tokens)

    def bounds(self, running: int) -> dict[str, Bound]:
        """Bounds of every knob while ``running`` requests are in the batch."""
        boot = self.boot
        plain = {
            "chunk_tokens": (self.least_chunk(running), boot.chunk_tokens),
            "long_prefill_threshold_tokens": (0, boot.chunk_tokens),
            "max_running_requests": (1, boot.max_running_requests),
            "batch_window_seconds": (0.0, MAX_WINDOW_SECONDS),
            "batch_window_min_requests": (0, boot.max_running_requests),
        }
        return {
            name: Bound(low, high, self.refused.get(name, ""))
            for name, (low, high) in plain.items()
        }

    def changed(
        self, current: KnobValues, changes: Mapping[str, object], running: int
    ) -> KnobValues:
        """``current`` with ``changes``, all or nothing. Raises KnobRefusedError."""
        bounds = self.bounds(running)
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in bounds:
                raise KnobRefusedError(name, value, f"no such knob; knobs: {', '.join(bounds)}")
            accepted[name] = self._checked(name, value, bounds[name], running)
        return replace(current, **accepted)

    def _checked(self, name: str, value: object, bound: Bound, running: int) -> float:
        number = knob_number(name, value)
        if number == getattr(self.boot, name):
            return number  # the boot value is always allowed, also of a knob that is refused
        if bound.why:
            raise KnobRefusedError(name, value, bound.why)
        if number > bound.maximum:
            limit = "the value at boot" if name != "batch_window_seconds" else "the cap"
            raise KnobRefusedError(name, value, f"above {limit}, {bound.maximum:g}")
        if number < bound.minimum:
            reason = f"below {bound.minimum:g}"
            if name == "chunk_tokens":
                reason += (
                    f": {running} running requests x (1 + {self.speculative_tokens}"
                    f" speculative tokens) must fit into a step, and this model needs"
                    f" {self.floor_tokens}"
                )
            raise KnobRefusedError(name, value, reason)
        if name == "long_prefill_threshold_tokens" and 0 < number < MIN_LONG_PREFILL_TOKENS:
            raise KnobRefusedError(name, value, f"below {MIN_LONG_PREFILL_TOKENS} and not 0 (off)")
        return number

    def budget(self, values: KnobValues, running: int) -> int:
        """Tokens of the next step: the set value, lifted to the floor, within the envelope."""
        lifted = max(values.chunk_tokens, self.least_chunk(running))
        return min(lifted, self.boot.chunk_tokens)

    def slots(self, values: KnobValues, running: int, *, asserted: bool) -> int:
        """Requests that may run. ``asserted``: the scheduler dies if it is below ``running``."""
        low = max(1, running) if asserted else 1
        return min(max(values.max_running_requests, low), self.boot.max_running_requests)


@dataclass(frozen=True, slots=True)
class Target:
    """What the next step uses, and until when (monotonic seconds; None: for good)."""

    values: KnobValues
    deadline: float | None = None
    bypass: bool = False

    def live(self, now: float) -> bool:
        """False once the lease behind it has run out."""
        return self.deadline is None or now < self.deadline


@dataclass(slots=True)
class _Lease:
    owner: str
    ttl_seconds: float
    deadline: float


def knob_number(name: str, value: object) -> float:
    """``value`` as the number that knob ``name`` takes: whole, but for the window's seconds.

    Raises KnobRefusedError for what is no finite number, or not whole where it must be.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise KnobRefusedError(name, value, "not a number")
    if not math.isfinite(value):
        raise KnobRefusedError(name, value, "not a finite number")
    if name == "batch_window_seconds":
        return float(value)
    if value != int(value):
        raise KnobRefusedError(name, value, "not a whole number")
    return int(value)


class KnobLaw:
    """Lease and target. Every method runs in the socket's thread; ``target`` is read anywhere."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self.target = Target(envelope.boot)
        self.expired_total = 0
        self._lease: _Lease | None = None

    def lease(self, owner: str, ttl_seconds: float, now: float) -> float:
        """Take or take over one's own lease; returns its seconds. Raises LeaseError."""
        self.expire(now)
        if not owner or len(owner) > 200:
            raise LeaseError("owner: 1 to 200 characters")
        held = self._lease
        if held is not None and held.owner != owner:
            raise LeaseError(
                f"held by {held.owner} for another {held.deadline - now:.1f} s unless renewed"
            )
        if not (isinstance(ttl_seconds, (int, float)) and math.isfinite(ttl_seconds)):
            raise LeaseError("ttl_s: not a finite number")
        ttl = min(max(float(ttl_seconds), 1.0), MAX_LEASE_SECONDS)
        self._lease = _Lease(owner, ttl, now + ttl)
        self._move_deadline()
        return ttl

    def renew(self, owner: str, now: float) -> float:
        """Start the lease's time anew. Raises LeaseError."""
        held = self._holder(owner, now)
        held.deadline = now + held.ttl_seconds
        self._move_deadline()
        return held.ttl_seconds

    def set(
        self, owner: str, changes: Mapping[str, object], now: float, running: int
    ) -> KnobValues:
        """Set knobs, all or nothing. Raises LeaseError, KnobRefusedError."""
        held = self._holder(owner, now)
        values = self.envelope.changed(self.target.values, changes, running)
        self.target = replace(self.target, values=values, deadline=held.deadline)
        return values

    def bypass(self, owner: str, on: bool, now: float) -> None:
        """Let the wrapper pass straight through (for measuring it). Raises LeaseError."""
        held = self._holder(owner, now)
        self.target = replace(self.target, bypass=on, deadline=held.deadline)

    def release(self, owner: str, now: float) -> None:
        """Give the lease back: boot values at once. Raises LeaseError."""
        self._holder(owner, now)
        self._end()

    def expire(self, now: float) -> bool:
        """End a lease that was not renewed. True when there was one."""
        if self._lease is None or now < self._lease.deadline:
            return False
        self.expired_total += 1
        self._end()
        return True

    def holder(self, now: float) -> tuple[str, float] | None:
        """Who holds the lease and for how many seconds yet."""
        held = self._lease
        if held is None or now >= held.deadline:
            return None
        return held.owner, held.deadline - now

    def _end(self) -> None:
        self._lease = None
        self.target = Target(self.envelope.boot)

    def _holder(self, owner: str, now: float) -> _Lease:
        self.expire(now)
        if self._lease is None:
            raise LeaseError("no lease: ask for one first (it may have run out)")
        if self._lease.owner != owner:
            raise LeaseError(f"held by {self._lease.owner}")
        return self._lease

    def _move_deadline(self) -> None:
        if self._lease is not None and self.target.deadline is not None:
            self.target = replace(self.target, deadline=self._lease.deadline)


class BatchWindow:
    """Whether admission is held now. Lives in the engine's thread; pure but for its own state."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._arrivals = 0

    def arrived(self, now: float, waiting: int, values: KnobValues) -> None:
        """A request comes in while ``waiting`` others wait: at an empty queue a window opens."""
        if self._deadline is not None:
            self._arrivals += 1
        elif values.batch_window_seconds > 0 and waiting == 0:
            self._deadline = now + min(values.batch_window_seconds, MAX_WINDOW_SECONDS)
            self._arrivals = 1

    def holds(self, now: float, waiting: int, values: KnobValues) -> bool:
        """Hold admission in this step? Ends the window when it is time."""
        deadline = self._deadline
        if deadline is None:
            return False
        enough = values.batch_window_min_requests
        if (
            values.batch_window_seconds <= 0
            or waiting == 0
            or waiting > self._arrivals  # preempted requests joined: they must not be held
            or (enough > 0 and waiting >= enough)
            or now >= deadline
        ):
            self._deadline = None
            return False
        return True

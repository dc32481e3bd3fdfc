"""The law of the knobs inside an engine's scheduler: who may set them, and for how long.

Pure: numbers and ``now`` (monotonic seconds) in, values out. The engine's thread only reads
``KnobLaw.target``, one immutable object that the socket's thread replaces; no lock is shared.

Only the lease holder sets, within what the engine was started with (bounds.Envelope). A lease not
renewed within its time (30 s at most) puts everything back to the boot values; the target carries
its own deadline, so a stuck socket thread cannot keep a setting alive.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic

from servoscope.exporters.knobs.bounds import Envelope, V

__all__ = ["MAX_LEASE_SECONDS", "KnobLaw", "LeaseError", "Target"]

MAX_LEASE_SECONDS = 30.0


class LeaseError(PermissionError):
    """Somebody else holds the lease, or nobody does."""


@dataclass(frozen=True, slots=True)
class Target(Generic[V]):
    """What the next step uses, and until when (monotonic seconds; None: for good)."""

    values: V
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


class KnobLaw(Generic[V]):
    """Lease and target. Every method runs in the socket's thread; ``target`` is read anywhere."""

    def __init__(self, envelope: Envelope[V]) -> None:
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
        number = isinstance(ttl_seconds, (int, float))
        if not (number and -sys.float_info.max <= ttl_seconds <= sys.float_info.max):
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

    def asked(self, now: float) -> V:
        """What the next step is to use: boot values once the lease has run out."""
        return self.target.values if self.target.live(now) else self.envelope.boot

    def set(self, owner: str, changes: Mapping[str, object], now: float, running: int) -> V:
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

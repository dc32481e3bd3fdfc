"""Counters of an engine followed across its restarts: what we publish never falls.

Pure. ``epoch`` says which life of the engine a reading belongs to (its process and start time), or
``None`` when that cannot be seen. A counter that fell in a new life, or in an unknown one, started
again at zero: all of its value is new. A counter that fell within one life is a fault of the
engine: nothing is added, and it is reported.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["MAX_KEYS", "Step", "Totals"]

MAX_KEYS = 50_000  # 64 ranks x 10 models x 30 buckets x 4 histograms need less

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Step(Generic[K]):
    """What changed from one reading to the next."""

    deltas: Mapping[K, float] = field(default_factory=dict)  # never negative
    reset: bool = False  # some counter started again at zero
    fell: tuple[K, ...] = ()  # counters that fell within one life of the engine


class Totals(Generic[K]):
    """Totals by key. The first reading is taken as it is: totals start at the engine's own.

    Keys come from an engine's text, so there is a cap: ``ignored`` counts readings beyond it.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self.ignored = 0
        self._last: dict[K, float] = {}
        self._total: dict[K, float] = {}
        self._epoch: Hashable = None
        self._primed = False

    def observe(self, readings: Mapping[K, float], epoch: Hashable = None) -> Step[K]:
        """Take one reading of all counters; those missing from it keep their totals."""
        known = epoch is not None and self._epoch is not None
        same_life = known and epoch == self._epoch
        new_life = known and not same_life
        if new_life:
            # All counters are at zero in the new life, also those that appear at their first event.
            self._last = dict.fromkeys(self._last, 0.0)
        deltas: dict[K, float] = {}
        fell: list[K] = []
        reset = self._primed and new_life
        for key, value in readings.items():
            last = self._last.get(key)
            if last is None:
                if len(self._last) >= self._max_keys:
                    self.ignored += 1
                    continue
                delta = value if self._primed else 0.0
                self._total[key] = value
            elif value >= last:
                delta = value - last
                self._total[key] += delta
            elif same_life:
                delta = 0.0
                fell.append(key)
            else:
                reset = True
                delta = value
                self._total[key] += delta
            self._last[key] = value
            deltas[key] = delta
        self._epoch = epoch if epoch is not None else self._epoch
        self._primed = True
        return Step(deltas, reset, tuple(fell))

    def total(self, key: K) -> float | None:
        """The total of one counter, or ``None`` when it was never read."""
        return self._total.get(key)

    def totals(self) -> Mapping[K, float]:
        """All totals."""
        return self._total

"""A cap on the values of a label that lets real values in and keeps junk out.

A label value that comes from outside (model name, tenant, request type) is a series for ever
unless somebody bounds it. While there is room every new value is kept. When the table is full, a
new value is folded into ``other`` and remembered in a small waiting table; only a value that keeps
coming challenges the least recently used one, and wins if it came more often. A value that
survives a challenge loses half of its standing and goes to the back of the queue, so what was busy
once and is silent now gives way in the end. 100,000 names that come once each evict nobody.

Pure: no clock; order of arrival is the only time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["OTHER", "LabelCap", "LabelTable"]

OTHER = "other"
_CHALLENGE_AFTER = 2  # arrivals in the waiting table before a value may challenge
_WAITING_PER_KEPT = 16  # a value may be this many times rarer than junk and still get in
_MAX_VALUE_CHARACTERS = 128


class LabelCap:
    """At most ``capacity`` values of one label; the rest is ``other``."""

    def __init__(self, capacity: int, on_evict: Callable[[str], None] | None = None) -> None:
        self.capacity = capacity
        self.folded = 0  # observations that went to ``other``
        self.evicted = 0
        self._on_evict = on_evict
        self._kept: OrderedDict[str, int] = OrderedDict()  # value -> standing, oldest use first
        self._waiting: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> Iterable[str]:
        """The values kept now."""
        return self._kept.keys()

    def admit(self, value: str) -> str:
        """``value`` when it is kept (now), else ``other``; empty stays empty."""
        kept = self._kept
        standing = kept.get(value)
        if standing is not None:
            kept[value] = standing + 1
            kept.move_to_end(value)
            return value
        if not value or value == OTHER:
            return value
        if len(value) > _MAX_VALUE_CHARACTERS:
            self.folded += 1
            return OTHER
        if len(kept) < self.capacity:
            kept[value] = 1
            return value
        arrivals = self._wait(value)
        if arrivals >= _CHALLENGE_AFTER and self._challenge(value, arrivals):
            return value
        self.folded += 1
        return OTHER

    def shown(self, value: str) -> str:
        """What ``admit`` would make of ``value`` now, without letting it in or counting it."""
        if not value or value in self._kept:
            return value
        room = len(self._kept) < self.capacity and len(value) <= _MAX_VALUE_CHARACTERS
        return value if room else OTHER

    def _wait(self, value: str) -> int:
        waiting = self._waiting
        arrivals = waiting.pop(value, 0) + 1
        waiting[value] = arrivals
        if len(waiting) > self.capacity * _WAITING_PER_KEPT:
            waiting.popitem(last=False)
        return arrivals

    def _challenge(self, value: str, arrivals: int) -> bool:
        if not self._kept:
            return False
        oldest, standing = next(iter(self._kept.items()))
        if arrivals <= standing:
            self._kept[oldest] = standing // 2
            self._kept.move_to_end(oldest)
            return False
        del self._kept[oldest]
        del self._waiting[value]
        self._kept[value] = arrivals
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(oldest)
        return True


class LabelTable:
    """One cap for each label that outsiders can fill."""

    def __init__(self, capacities: dict[str, int], on_evict: Callable[[str, str], None]) -> None:
        self._caps: dict[str, LabelCap] = {}
        for label, capacity in capacities.items():

            def evict(value: str, label: str = label) -> None:
                on_evict(label, value)

            self._caps[label] = LabelCap(capacity, evict)

    def admit(self, label: str, value: str) -> str:
        """As ``LabelCap.admit`` for one label."""
        return self._caps[label].admit(value)

    def shown(self, label: str, value: str) -> str:
        """As ``LabelCap.shown`` for one label."""
        return self._caps[label].shown(value)

    def folded(self) -> dict[str, int]:
        """Observations folded so far, by label."""
        return {label: cap.folded for label, cap in self._caps.items()}

    def sizes(self) -> dict[str, int]:
        """Values kept now, by label."""
        return {label: len(cap) for label, cap in self._caps.items()}

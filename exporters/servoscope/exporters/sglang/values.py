"""Values out of an engine's JSON: a number that cannot be is refused by name, not guessed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from servoscope.exporters.plausibility import MAX_TOKENS, Refused

__all__ = ["Numbers", "short_name", "whole"]

_MAX_NAME = 128
_MAX_SHOWN = 32
_MAX_NUMBER = 1e12  # seconds; a moment of today is 2e9


class Numbers:
    """Numbers by name; one that cannot be is noted in ``refused`` and ``None``."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told
        self.refused: list[Refused] = []

    def has(self, name: str) -> bool:
        """Whether the engine told it at all."""
        return self._told.get(name) is not None

    def number(self, *names: str) -> float | None:
        """The first that is there, finite and not negative."""
        for name in names:
            value = self._told.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self._refuse(name, type(value).__name__, "not a number")
            elif isinstance(value, float) and not math.isfinite(value):
                self._refuse(name, repr(value), "not a finite number")
            elif value < 0:
                self._refuse(name, repr(value), "negative")
            elif value > _MAX_NUMBER:  # before float(): a whole number can be beyond any float
                self._refuse(name, repr(value), f"more than {_MAX_NUMBER:g}")
            else:
                return float(value)
            return None
        return None

    def count(self, *names: str) -> int | None:
        """The first that is there, a whole number in 0..100,000,000."""
        for name in names:
            value = self._told.get(name)
            if value is None:
                continue
            if (found := whole(value)) is None:
                known = isinstance(value, (int, float))
                self._refuse(
                    name,
                    repr(value) if known else type(value).__name__,
                    f"not a whole number in 0..{MAX_TOKENS}",
                )
            return found
        return None

    def counts(self, name: str, keys: tuple[str, ...]) -> int | None:
        """Sum of some values of a nested object; ``None`` where it is not told."""
        nested = self._told.get(name)
        if not isinstance(nested, Mapping):
            return None
        found = [n for key in keys if (n := whole(nested.get(key))) is not None]
        return sum(found) if found else None

    def _refuse(self, name: str, shown: str, why: str) -> None:
        self.refused.append(Refused(name, shown[:_MAX_SHOWN], why))


def whole(value: object) -> int | None:
    """``value`` if it is a whole number in 0..100,000,000."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_TOKENS else None


def short_name(value: object) -> str:
    """A short text; numbers too, because labels may be numbers."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return ""
    return str(value)[:_MAX_NAME]

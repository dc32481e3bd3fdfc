"""What knobs of an engine may be: numbers, bounds, and all of a change or nothing of it. Pure."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

__all__ = ["Bound", "Envelope", "KnobRefusedError", "Values", "knob_number"]


class KnobRefusedError(ValueError):
    """A value that is not set: which knob, which value, and the bound it broke."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name[:80]}={repr(value)[:80]}: {why}")
        self.name = name
        self.value = value
        self.why = why


class Values(Protocol):
    """One setting of all knobs of an engine: a frozen dataclass whose fields are the knobs."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def batch_window_seconds(self) -> float:
        """Every engine with knobs has the window (see BatchWindow)."""

    @property
    def batch_window_min_requests(self) -> int:
        """So many requests end it early."""

    def as_json(self) -> dict[str, float]:
        """The values by knob name."""


V = TypeVar("V", bound=Values)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a knob may be now. ``why`` is not empty when it cannot be set at all."""

    minimum: float
    maximum: float
    why: str = ""


def knob_number(name: str, value: object) -> float:
    """``value`` as the number that knob ``name`` takes: whole, but for the window's seconds.

    Raises KnobRefusedError for what is no finite number, or not whole where it must be.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise KnobRefusedError(name, value, "not a number")
    # By comparison: isfinite() raises for whole numbers that no float can hold.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise KnobRefusedError(name, value, "not a finite number")
    if name == "batch_window_seconds":
        return float(value)
    if value != int(value):
        raise KnobRefusedError(name, value, "not a whole number")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope(ABC, Generic[V]):
    """What the engine was started with. ``refused`` says of a knob why this engine has it not."""

    boot: V
    refused: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def limits(self, running: int) -> dict[str, tuple[float, float]]:
        """Least and largest value of every knob while ``running`` requests are in the batch."""

    def bounds(self, running: int = 0) -> dict[str, Bound]:
        """Bounds of every knob while ``running`` requests are in the batch."""
        return {
            name: Bound(low, high, self.refused.get(name, ""))
            for name, (low, high) in self.limits(running).items()
        }

    def changed(self, current: V, changes: Mapping[str, object], running: int = 0) -> V:
        """``current`` with ``changes``, all or nothing. Raises KnobRefusedError."""
        bounds = self.bounds(running)
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in bounds:
                raise KnobRefusedError(name, value, f"no such knob; knobs: {', '.join(bounds)}")
            accepted[name] = self._checked(name, value, bounds[name], running)
        return self._together(current, replace(current, **accepted), accepted)

    def _checked(self, name: str, value: object, bound: Bound, running: int) -> float:
        number, boot = knob_number(name, value), getattr(self.boot, name)
        if number == boot:
            return number  # the boot value is always allowed, also of a knob that is refused
        why = bound.why
        if not why and number > bound.maximum:
            limit = "the value at boot" if bound.maximum == boot else "the cap"
            why = f"above {limit}, {bound.maximum:g}"
        elif not why and number < bound.minimum:
            why = f"below {bound.minimum:g}{self._floor_is(name, running)}"
        if why := why or self._unfit(name, number):
            raise KnobRefusedError(name, value, why)
        return number

    def _floor_is(self, _name: str, _running: int) -> str:
        """What the least value of a knob comes from, to be added to a refusal."""
        return ""

    def _unfit(self, _name: str, _number: float) -> str:
        """Why a number within its bounds is none for this knob; empty when it is one."""
        return ""

    def _together(self, _current: V, wanted: V, _asked: Mapping[str, object]) -> V:
        """``wanted``, with what has to go with it. Raises KnobRefusedError."""
        return wanted

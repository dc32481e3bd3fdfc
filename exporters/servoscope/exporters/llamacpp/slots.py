"""llama.cpp's ``GET /slots`` as an EngineSample. Pure; of each slot a list of numbers is read.

Every slot runs one request at a time. **Builds before b6337, and later ones that were started with
LLAMA_SERVER_SLOTS_DEBUG, put prompts (and answers) of people into this answer.** Nothing of them
is kept, shown or part of an error, and ``carries_text`` says that they were there.

``n_prompt_tokens`` is, by its name, the prompt. It is what the slot holds in the KV cache: prompt
and generated tokens, also of the request before until the next one overwrites it. So it is taken
for that, and of working slots only: what idle slots hold is given up as soon as it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from servoscope.exporters.plausibility import MAX_TOKENS, Refused
from servoscope.exporters.records import EngineSample, Reading

__all__ = ["Slots", "read_slots"]

_MAX_SLOTS = 4_096
_TEXT_NAMES = ("prompt", "generated")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Slots:
    """What all slots say together; ``None`` where one of them does not say, or was refused.

    ``context_tokens`` is the smallest slot's, ``held_tokens`` what working slots have in the KV
    cache. ``sample`` has ``running`` and ``kv_usage_ratio``, as far as they can be told.
    """

    total: int
    processing: int | None
    context_tokens: int | None
    held_tokens: int | None
    carries_text: bool
    sample: EngineSample


@dataclass(frozen=True, slots=True)
class _Slot:
    busy: bool | None = None
    context: int | None = None
    held: int | None = None


def read_slots(text: str | bytes, *, unified: bool | None) -> Slots:
    """Read one answer. Raises ValueError, naming what is wrong, when it lists no slots.

    ``unified``: whether the slots share one KV cache (``settings.Settings``). Without knowing
    it, how full the cache is cannot be said of several slots.
    """
    told = _parsed(text)
    if not isinstance(told, list) or not told:
        raise ValueError("the answer is no JSON list of slots")
    if len(told) > _MAX_SLOTS:
        raise ValueError(f"more than {_MAX_SLOTS} slots")
    refused: list[Refused] = []
    slots = [_slot(one, place, refused) for place, one in enumerate(told)]
    busy = _known(slot.busy for slot in slots)
    contexts = _known(slot.context for slot in slots)
    held = _known(slot.held for slot in slots if slot.busy is not False)
    processing = None if busy is None else sum(busy)
    held_tokens = None if held is None else sum(held)
    readings = [] if processing is None else [Reading("running", float(processing))]
    capacity = _capacity(contexts, unified=unified)
    if held_tokens is not None and capacity is not None:
        if held_tokens <= capacity:
            readings.append(Reading("kv_usage_ratio", held_tokens / capacity))
        else:
            why = f"more than the {capacity} that all slots have"
            refused.append(Refused("n_prompt_tokens", str(held_tokens), why))
            held_tokens = None
    return Slots(
        total=len(slots),
        processing=processing,
        context_tokens=None if contexts is None else min(contexts),
        held_tokens=held_tokens,
        carries_text=any(isinstance(one, Mapping) and _has_text(one) for one in told),
        sample=EngineSample(
            engine="llamacpp", version=None, readings=tuple(readings), refused=tuple(refused)
        ),
    )


def _parsed(text: str | bytes) -> Any:
    """The answer, or ``None``: the parser's own error holds the whole text, so it ends here."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _has_text(slot: Mapping[str, Any]) -> bool:
    return any(name in slot for name in _TEXT_NAMES)


def _slot(told: object, place: int, refused: list[Refused]) -> _Slot:
    if not isinstance(told, Mapping):
        refused.append(Refused(f"slots[{place}]", type(told).__name__, "not an object"))
        return _Slot()
    context = _count(told, f"slots[{place}].n_ctx", 1, MAX_TOKENS, refused)
    busy = _busy(told, place, refused)
    if not busy:
        return _Slot(busy, context)
    most = MAX_TOKENS if context is None else context
    return _Slot(busy, context, _count(told, f"slots[{place}].n_prompt_tokens", 0, most, refused))


def _busy(told: Mapping[str, Any], place: int, refused: list[Refused]) -> bool | None:
    """``is_processing``; builds before October 2024 say ``state``, 0 or 1."""
    value = told.get("is_processing")
    if isinstance(value, bool):
        return value
    if value is not None:
        why = "neither true nor false"
        refused.append(Refused(f"slots[{place}].is_processing", type(value).__name__, why))
        return None
    state = _count(told, f"slots[{place}].state", 0, 1, refused)
    return None if state is None else state == 1


def _count(
    told: Mapping[str, Any], where: str, least: int, most: int, refused: list[Refused]
) -> int | None:
    """The whole number of that name; ``where`` is its full name."""
    value = told.get(where.rpartition(".")[2])
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        refused.append(Refused(where, type(value).__name__, "not a whole number"))
    elif not least <= value <= most:
        refused.append(Refused(where, repr(value)[:32], f"outside {least}..{most}"))
    else:
        return value
    return None


def _known(values: Iterable[_T | None]) -> list[_T] | None:
    """All of them, or ``None`` when one is not known."""
    found: list[_T] = []
    for value in values:
        if value is None:
            return None
        found.append(value)
    return found


def _capacity(contexts: Sequence[int] | None, *, unified: bool | None) -> int | None:
    """Tokens that fit into the KV cache of all slots."""
    if not contexts:
        return None
    if len(contexts) == 1 or unified:
        return max(contexts)
    return sum(contexts) if unified is False else None

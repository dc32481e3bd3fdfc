"""Sidecar side: what ranks say of their knobs, and that as the vocabulary's Knobs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servoscope.exporters.plugin.hello import ProtocolError, number_of, text_of
from servoscope.exporters.records import Knob, KnobMode

__all__ = ["KnobState", "RankKnob", "described", "number", "state_from_message"]

_COUNTS = (
    "rank",
    "leases_expired_total",
    "faults",
    "running",
    "waiting",
    "steps",
    "empty_steps",
    "held_steps",
    "scheduled_tokens",
    "step_tokens_max",
)


@dataclass(frozen=True, slots=True)
class RankKnob:
    """One knob on one rank."""

    value: float
    boot: float
    minimum: float
    maximum: float
    why: str = ""  # not empty: cannot be set


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobState:
    """What one rank says: knobs, lease, and the scheduler's counters since its boot."""

    rank: int
    knobs: Mapping[str, RankKnob]
    in_force: Mapping[str, int]  # the scheduler's attributes now; they follow at the next step
    lease_owner: str | None
    lease_seconds_left: float | None
    leases_expired_total: int
    bypass: bool
    off: str
    faults: int
    running: int
    waiting: int
    steps: int
    empty_steps: int
    held_steps: int
    scheduled_tokens: int
    step_tokens_max: int  # largest step since this client's last read
    scheduler_cpu_seconds: float
    plugin_cpu_seconds: float


def state_from_message(message: Mapping[str, Any]) -> KnobState:
    """Check a ``state`` answer. Raises ProtocolError naming the field."""
    where = "knobs"
    try:
        knobs: dict[str, RankKnob] = {}
        for name, said in message["knobs"].items():
            where = f"knobs.{name}"[:80]
            knobs[str(name)] = RankKnob(
                value=number(said["value"]),
                boot=number(said["boot"]),
                minimum=number(said["minimum"]),
                maximum=number(said["maximum"]),
                why=text_of(said.get("why")),
            )
        where = "lease"
        lease = message.get("lease") or {}
        owner, left = lease.get("owner"), lease.get("seconds_left")
        where = "in_force"
        in_force = {str(k): int(number(v)) for k, v in (message.get("in_force") or {}).items()}
        where = "counters"
        count = {name: int(number(message[name])) for name in _COUNTS}
        return KnobState(
            knobs=knobs,
            in_force=in_force,
            lease_owner=None if owner is None else text_of(owner),
            lease_seconds_left=None if left is None else number_of(left),
            bypass=message["bypass"] is True,
            off=text_of(message.get("off")),
            scheduler_cpu_seconds=number(message["scheduler_cpu_seconds"]),
            plugin_cpu_seconds=number(message["plugin_cpu_seconds"]),
            **count,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"state: {where}: {error!r}"[:300]) from error


def number(value: object) -> float:
    """A finite number out of a message. Raises ValueError for anything else, NaN among it."""
    found = number_of(value)
    if found is None:
        raise ValueError(f"no finite number: {value!r:.40}")
    return found


def described(
    states: Sequence[KnobState],
    units: Mapping[str, str],
    *,
    flags: Mapping[str, str],
    without: str,
    live: Callable[[str, float], str],
) -> list[Knob]:
    """Every knob of an engine, over all its ranks. Without states what a restart could change.

    Bounds are the tightest over the ranks; a knob whose ranks differ has no single value and
    ``why`` says so. ``flags`` change a knob by a restart, ``without`` says why no rank steers it,
    ``live`` what there is to know of one that can be set, from its name and boot value.
    """
    return [
        _over_ranks(name, unit, states, flag=flags.get(name), without=without, live=live)
        for name, unit in units.items()
    ]


def _over_ranks(
    name: str,
    unit: str,
    states: Sequence[KnobState],
    *,
    flag: str | None,
    without: str,
    live: Callable[[str, float], str],
) -> Knob:
    ranks = [s.knobs[name] for s in states if name in s.knobs]
    off = next((s.off for s in states if s.off), "")
    if not ranks or off:
        return Knob(
            name=name,
            mode=KnobMode.RESTART if flag else KnobMode.OBSERVE,
            unit=unit,
            value=None,
            boot_value=None,
            minimum=None,
            maximum=None,
            why=(off or without) + (f"; restart with {flag}" if flag else ""),
        )
    refused = next((r.why for r in ranks if r.why), "")
    values = sorted({r.value for r in ranks})
    differ = f"ranks differ: {', '.join(f'{v:g}' for v in values)}" if len(values) > 1 else ""
    boot = min(r.boot for r in ranks)
    return Knob(
        name=name,
        mode=KnobMode.OBSERVE if refused else KnobMode.LIVE,
        unit=unit,
        value=values[0] if len(values) == 1 else None,
        boot_value=boot,
        minimum=max(r.minimum for r in ranks),
        maximum=min(r.maximum for r in ranks),
        why=refused or differ or live(name, boot),
    )

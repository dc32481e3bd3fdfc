"""Which engines have knobs, and how each kind's ranks are reached and described."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from servoscope.exporters.knobs.group import KnobGroup
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.llamacpp import knobs as llamacpp
from servoscope.exporters.records import Knob
from servoscope.exporters.sglang import knobs as sglang
from servoscope.exporters.vllm import knobs as vllm

__all__ = [
    "NO_KNOBS",
    "OBSERVE_ONLY",
    "Connect",
    "KnobKind",
    "KnobRanks",
    "knob_kind",
    "with_boot_values",
]

NO_KNOBS = (
    "no knob can be set on this engine: our plug-in does not wrap its scheduler. "
    "Install servoscope in the engine's environment and start it with SERVOSCOPE_KNOBS=1"
)
OBSERVE_ONLY = "no knob of {} can be set live: it takes its settings at its start; observe only"


class KnobRanks(Protocol):
    """All ranks of one engine: ``KnobGroup``, ``SglangKnobGroup``, or a double in tests."""

    async def get(self) -> list[KnobState]:
        """The state of every rank."""

    async def lease(self, owner: str, ttl_s: float) -> float:
        """Take the lease on all ranks, or none."""

    async def renew(self) -> float:
        """Start the lease's time anew."""

    async def set(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Set on all ranks, or none; what each applied."""

    async def release(self) -> None:
        """Give the lease back."""

    async def aclose(self) -> None:
        """Close the connections."""


Connect = Callable[[Sequence[Path]], Awaitable[KnobRanks]]


@dataclass(frozen=True, slots=True)
class KnobKind:
    """``why_none``: why an engine of this version shows no knobs socket, in words.

    ``counts_steps``: whether the socket tells what the scheduler did, or only of knobs.
    """

    connect: Connect
    describe: Callable[[Sequence[KnobState]], list[Knob]]
    why_none: Callable[[str | None], str]
    counts_steps: bool = True


_KINDS = {
    "vllm": KnobKind(KnobGroup.connect, vllm.describe, lambda _version: NO_KNOBS),
    "sglang": KnobKind(sglang.SglangKnobGroup.connect, sglang.describe, sglang.why_none),
    "llamacpp": KnobKind(
        KnobGroup.connect, llamacpp.describe, lambda _version: llamacpp.NOT_LIVE, counts_steps=False
    ),
}


def knob_kind(engine: str) -> KnobKind | None:
    """How knobs of this engine are turned; None for one that has none."""
    return _KINDS.get(engine)


def with_boot_values(knobs: Sequence[Knob], told: Mapping[str, float]) -> list[Knob]:
    """``knobs``, with what is known of the engine's start for those that nobody steers."""
    return [
        replace(knob, value=told[knob.name], boot_value=told[knob.name])
        if knob.value is None and knob.boot_value is None and knob.name in told
        else knob
        for knob in knobs
    ]

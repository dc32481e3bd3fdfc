"""Which engines have knobs, and how each kind's ranks are reached and described."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from servoscope.exporters.knobs.group import KnobGroup
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.records import Knob
from servoscope.exporters.sglang import knobs as sglang
from servoscope.exporters.vllm import knobs as vllm

__all__ = ["NO_KNOBS", "OBSERVE_ONLY", "Connect", "KnobKind", "KnobRanks", "knob_kind"]

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
    """``why_none``: why an engine of this version shows no knobs socket, in words."""

    connect: Connect
    describe: Callable[[Sequence[KnobState]], list[Knob]]
    why_none: Callable[[str | None], str]


_KINDS = {
    "vllm": KnobKind(KnobGroup.connect, vllm.describe, lambda _version: NO_KNOBS),
    "sglang": KnobKind(sglang.SglangKnobGroup.connect, sglang.describe, sglang.why_none),
}


def knob_kind(engine: str) -> KnobKind | None:
    """How knobs of this engine are turned; None for one that has none."""
    return _KINDS.get(engine)

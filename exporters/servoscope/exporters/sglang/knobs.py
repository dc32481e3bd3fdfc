"""Sidecar side of SGLang's knobs: a group of ranks as one, confirmed on every rank or rolled back.

Each rank has a socket (knobs.server). Settings go to the first rank of each data-parallel
replica and travel from there with its requests; whether they arrived is read from all ranks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from servoscope.exporters.knobs.client import KnobClient, KnobRefused
from servoscope.exporters.knobs.group import KnobGroup, states_of
from servoscope.exporters.knobs.reading import KnobState, described
from servoscope.exporters.plugin.hello import ProtocolError
from servoscope.exporters.records import Knob
from servoscope.exporters.sglang.knob_set import KNOB_UNITS

__all__ = ["RESTART_FLAGS", "SglangKnobGroup", "describe", "why_none"]

#: How long every rank may take to show a setting. A scheduler that sleeps wakes once a second.
CONFIRM_SECONDS = 3.0
POLL_SECONDS = 0.02
MAX_TP_SIZE = 4_096
FIRST_WITH_PLUGINS = (0, 5, 11)

#: How each knob is set when the engine has to be restarted for it.
RESTART_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "chunk_tokens": "--chunked-prefill-size",
        "prefill_decode_interval": "--prefill-decode-interval (later than 0.5.12)",
        "mixed_chunk": "--enable-mixed-chunk",
        "max_running_requests": "--max-running-requests",
        "batch_window_seconds": "--enable-prefill-delayer --prefill-delayer-max-delay-ms",
    }
)
NOT_HOOKED = (
    "no knob can be set on this engine: our plug-in does not steer its scheduler. Install "
    "servoscope in the engine's environment and start it with SERVOSCOPE_KNOBS=1 (where "
    "SGLANG_PLUGINS is set it must name servoscope)"
)


def why_none(version: str | None) -> str:
    """Why an SGLang of this version shows no knobs socket."""
    if (found := re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")) is not None:
        numbers = tuple(int(part) for part in found.groups())
        if numbers < FIRST_WITH_PLUGINS:
            return (
                f"SGLang {version} has no plug-in system, so no knob can be set live: "
                "it came with 0.5.11 (the knobs need what 0.5.23 has)"
            )
    return NOT_HOOKED


@dataclass(frozen=True, slots=True)
class _Rank:
    """One scheduler process."""

    client: KnobClient
    dp_rank: int
    tp_rank: int
    tp_size: int

    @property
    def name(self) -> str:
        return f"DP rank {self.dp_rank} TP rank {self.tp_rank}"


def _rank_of(client: KnobClient) -> _Rank:
    values = client.hello.boot_values
    tp_rank, tp_size = values.get("tp_rank"), values.get("tp_size")
    if not isinstance(tp_rank, int) or not isinstance(tp_size, int) or client.hello.rank is None:
        raise ProtocolError("hello: boot_values.tp_rank, boot_values.tp_size or rank is missing")
    if not 0 <= tp_rank < tp_size <= MAX_TP_SIZE:
        raise ProtocolError(f"hello: TP rank {tp_rank!r:.20} of {tp_size!r:.20} cannot be")
    return _Rank(client, client.hello.rank, tp_rank, tp_size)


class SglangKnobGroup(KnobGroup):
    """All ranks of one server as one; ``clients`` are the first ranks', which take settings."""

    def __init__(
        self, clients: Sequence[KnobClient], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks = sorted(map(_rank_of, clients), key=lambda r: (r.dp_rank, r.tp_rank))
        self._first = [rank for rank in self._ranks if rank.tp_rank == 0]
        if not self._first:
            raise ProtocolError("none of the knobs sockets is a first rank's")
        super().__init__([rank.client for rank in self._first])
        self._clock = clock

    async def get(self) -> list[KnobState]:
        """One state a replica; also those of further ranks where they show other values."""
        states = await self._states()
        shown: list[KnobState] = []
        for rank, state in zip(self._ranks, states, strict=True):
            if rank.tp_rank:
                continue
            group = [s for r, s in zip(self._ranks, states, strict=True) if r.dp_rank == state.rank]
            shown += [s for s in group if _values(s) != _values(state) and not s.off]
            why = self._incomplete(states, rank.dp_rank)
            shown.append(replace(state, off=state.off or why))
        return shown

    async def set(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Set all replicas. Returns what each applied, also what went with it.

        Raises KnobRefused, after the old values were put back, when a rank does not show the new
        values within CONFIRM_SECONDS, and before anything is set when a rank is missing.
        """
        before = await self._states()
        if why := self._incomplete(before, None):
            raise KnobRefused(why)
        old = [
            (rank.client, _values(state))
            for rank, state in zip(self._ranks, before, strict=True)
            if rank.tp_rank == 0
        ]
        applied = await super().set(values)
        try:
            unsure = await self._confirmed(applied)
        except BaseException:
            await self._roll_back(old)
            raise
        if unsure:
            await self._roll_back(old)
            raise KnobRefused(f"not set, the old values are back: {unsure}")
        return applied

    async def aclose(self) -> None:
        """Close all."""
        for rank in self._ranks:
            await rank.client.aclose()

    async def _states(self) -> list[KnobState]:
        return await states_of(rank.client for rank in self._ranks)

    def _incomplete(self, states: Sequence[KnobState], dp_rank: int | None) -> str:
        """Which rank is missing or off; a setting would part the ranks of a group."""
        for rank, state in zip(self._ranks, states, strict=True):
            if state.off and dp_rank in (None, rank.dp_rank):
                return f"{rank.name}: {state.off}"
        for first in self._first:
            there = {rank.tp_rank for rank in self._ranks if rank.dp_rank == first.dp_rank}
            missing = sorted(set(range(first.tp_size)) - there)
            if missing and dp_rank in (None, first.dp_rank):
                return f"DP rank {first.dp_rank} TP rank {missing[0]} has no knobs socket"
        return ""

    async def _confirmed(self, applied: Sequence[Mapping[str, float]]) -> str:
        """Wait until every rank shows what its first rank was told. Returns what is amiss."""
        wanted = {rank.dp_rank: told for rank, told in zip(self._first, applied, strict=True)}
        deadline = self._clock() + CONFIRM_SECONDS
        while True:
            states = await self._states()
            amiss = [
                f"{rank.name} shows {name}={state.knobs[name].value:g}, not {value:g}"
                for rank, state in zip(self._ranks, states, strict=True)
                for name, value in wanted[rank.dp_rank].items()
                if name in state.knobs and state.knobs[name].value != value
            ]
            if not amiss or self._clock() >= deadline:
                return amiss[0] if amiss else ""
            await asyncio.sleep(POLL_SECONDS)


def _values(state: KnobState) -> dict[str, float]:
    return {name: knob.value for name, knob in state.knobs.items()}


def describe(states: Sequence[KnobState]) -> list[Knob]:
    """Every SGLang knob, over all ranks. Without states what a restart could change."""
    return described(
        states,
        KNOB_UNITS,
        flags=RESTART_FLAGS,
        without="the engine has no plug-in that steers it",
        live=_explained,
    )


def _explained(name: str, boot: float) -> str:
    if name == "chunk_tokens":
        return (
            f"boot value {boot:g} is the ceiling; below it prefill_decode_interval >= 1 or mixed "
            "chunk goes with it"
        )
    return f"boot value {boot:g} is the ceiling" if name == "max_running_requests" else ""

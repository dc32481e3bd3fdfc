"""Sidecar side: the knobs sockets of all ranks of a server as one.

All ranks acknowledge a setting, or all get their old values back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from servoscope.exporters.knobs.client import KnobClient
from servoscope.exporters.knobs.reading import KnobState

__all__ = ["KnobGroup", "states_of"]


async def states_of(clients: Iterable[KnobClient]) -> list[KnobState]:
    """The state of each, in order."""
    return list(await asyncio.gather(*(client.get() for client in clients)))


class KnobGroup:
    """All ranks of one server as one."""

    def __init__(self, clients: Sequence[KnobClient]) -> None:
        if not clients:
            raise ValueError("no engine cores")
        self.clients = tuple(clients)

    @classmethod
    async def connect(cls, paths: Iterable[Path]) -> Self:
        """Connect to all. Raises OSError, ProtocolError; then none stays open."""
        made: list[KnobClient] = []
        try:
            for path in paths:
                made.append(await KnobClient.connect(path))  # noqa: PERF401 - closed on error
            return cls(made)
        except BaseException:
            for client in made:
                await client.aclose()
            raise

    async def get(self) -> list[KnobState]:
        """The state of every rank, in order."""
        return await states_of(self.clients)

    async def lease(self, owner: str, ttl_s: float = 30.0) -> float:
        """Lease all ranks, or none. Returns the shortest time granted."""
        taken: list[KnobClient] = []
        try:
            granted = []
            for client in self.clients:
                granted.append(await client.lease(owner, ttl_s))
                taken.append(client)
        except BaseException:
            for client in taken:
                with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                    await client.release()
            raise
        return min(granted)

    async def renew(self) -> float:
        """Renew all. Raises as soon as one does not."""
        return min(await asyncio.gather(*(c.renew() for c in self.clients)))

    async def set(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Set all ranks; if one does not take it, the others get their old values back."""
        before = await states_of(self.clients)
        done: list[tuple[KnobClient, Mapping[str, float]]] = []
        applied = []
        try:
            for client, state in zip(self.clients, before, strict=True):
                old = {n: state.knobs[n].value for n in values if n in state.knobs}
                # Noted first: a rank that did not answer may have taken the value all the same.
                done.append((client, old))
                applied.append(await client.set(values))
        except BaseException:
            await self._roll_back(done)
            raise
        return applied

    async def release(self) -> None:
        """Release all; the first error is raised after all were asked."""
        results = await asyncio.gather(*(c.release() for c in self.clients), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def aclose(self) -> None:
        """Close all."""
        for client in self.clients:
            await client.aclose()

    async def _roll_back(self, done: Sequence[tuple[KnobClient, Mapping[str, float]]]) -> None:
        """Old values to every rank asked so far; one that is out of reach reverts by its lease."""
        await asyncio.gather(*(client.set(old) for client, old in done), return_exceptions=True)

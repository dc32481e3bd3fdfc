"""The embedded engine's chunk as a knob on the plug-in wire: lease, bounds, revert, read-back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from servoscope.exporters.knobs.bounds import Envelope
from servoscope.exporters.knobs.law import Target
from servoscope.exporters.knobs.pilot import KnobPilot
from servoscope.exporters.knobs.server import KnobHandler, socket_name
from servoscope.exporters.llamacpp.knobs import KNOB_UNITS
from servoscope.exporters.plugin import facts
from servoscope.exporters.plugin.line_server import Connection, LineServer

__all__ = ["ChunkEnvelope", "ChunkHandler", "ChunkPilot", "ChunkValues", "Hook", "serve_chunk"]

_WORKING_SECONDS = 1.0  # an engine that has not asked for so long makes no steps
NOT_ASKED = "this build of llama.cpp does not ask where the hook is: its chunk is as it was started"


class Hook(Protocol):
    """What stands in front of the engine (``chunk_hook.ChunkHook``)."""

    def set(self, tokens: int, until: float) -> None:
        """At most ``tokens`` a step until ``until``; 0: the boot value."""

    def boot(self) -> int:
        """Tokens a step as the engine was started."""

    def used(self) -> int:
        """Tokens that the last step was allowed."""

    def asked(self) -> int:
        """Steps so far."""

    def asked_at(self) -> float:
        """When the last one was."""


@dataclass(frozen=True, slots=True)
class ChunkValues:
    """One setting. llama.cpp admits a request as soon as a slot is free: there is no window."""

    chunk_tokens: int

    @property
    def batch_window_seconds(self) -> float:
        """None."""
        return 0.0

    @property
    def batch_window_min_requests(self) -> int:
        """None."""
        return 0

    def as_json(self) -> dict[str, float]:
        """The values by knob name."""
        return {"chunk_tokens": self.chunk_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEnvelope(Envelope[ChunkValues]):
    """From a token for every slot and one for a prompt, to the chunk at boot.

    The server fills a step with a token of every slot that decodes, then with prompts: with less
    room than that a prompt would never move on.
    """

    slots: int

    def limits(self, _running: int) -> dict[str, tuple[float, float]]:
        """Whatever runs: all slots may."""
        boot = self.boot.chunk_tokens
        return {"chunk_tokens": (min(self.slots + 1, boot), boot)}

    def _floor_is(self, _name: str, _running: int) -> str:
        return f": a token of each of {self.slots} slots and one of a prompt must fit into a step"


class ChunkPilot(KnobPilot[ChunkValues]):
    """Hands the law's target to the hook. ``slots``: requests that run at once."""

    units: ClassVar[Mapping[str, str]] = {"chunk_tokens": KNOB_UNITS["chunk_tokens"]}

    def __init__(
        self,
        hook: Hook,
        *,
        slots: int,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        boot = hook.boot()
        envelope = ChunkEnvelope(boot=ChunkValues(max(boot, 1)), slots=slots)
        super().__init__(hook, envelope, rank=0, off="" if boot else NOT_ASKED, clock=clock)
        self._hook = hook
        self._model_name = model_name
        self._sent: Target[ChunkValues] = self.law.target

    def hello(self) -> dict[str, Any]:
        """The first line of the socket."""
        return facts.hello(
            "llamacpp",
            boot_values={} if self.off else self.envelope.boot.as_json(),
            missing=[],
            rank=self.rank,
            off=self.off,
            model_names=[self._model_name],
        )

    def counts(self) -> tuple[int, int]:
        """(1, 0) while the engine makes steps, for how many requests it does not tell us."""
        return int(self._clock() - self._hook.asked_at() < _WORKING_SECONDS), 0

    def passed(self) -> int:
        """Steps so far."""
        return self._hook.asked()

    def in_force(self) -> dict[str, int]:
        """What the last step was allowed."""
        return {"chunk_tokens": self._hook.used()}

    def follow(self) -> None:
        """Tell the hook what is asked for, if that has changed."""
        target = self.law.target
        if target is self._sent or self.off:
            return
        if target.deadline is None:
            self._hook.set(0, 0.0)
        else:
            self._hook.set(target.values.chunk_tokens, target.deadline)
        self._sent = target


class ChunkHandler(KnobHandler):
    """The knobs socket. What it changed is with the hook before the next message is read."""

    def __init__(self, pilot: ChunkPilot, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(pilot, clock)
        self._chunk = pilot

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        """One request; exactly one answer."""
        super().received(connection, message)
        self._chunk.follow()

    def tick(self, connections: Iterable[Connection]) -> float:
        """End what was not renewed; answer the sets that a step has taken over."""
        wait = super().tick(connections)
        self._chunk.follow()
        return wait


def serve_chunk(pilot: ChunkPilot, directory: Path, group_name: str | None) -> LineServer:
    """Open the socket of this process and serve it in a thread of its own."""
    path = directory / socket_name(pilot, os.getpid())
    server = LineServer(path, ChunkHandler(pilot), group_name=group_name)
    server.start()
    return server

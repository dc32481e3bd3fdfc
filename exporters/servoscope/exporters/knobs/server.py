"""The knobs socket of one rank: ``knobs-<pid>-dp<rank>.sock`` (further ranks: see their Pilot).

Requests are JSON lines ``{"id": any, "op": ...}``; each gets one answer with the same ``id``.

    get                          -> state
    lease {owner, ttl_s}         -> leased {ttl_s}
    renew                        -> leased {ttl_s}
    set {values: {knob: value}}  -> set {applied, pending?}  the values the next step uses
    release                      -> released
    bypass {on}                  -> bypassed {on}            lease holder only, where there is one
    anything refused             -> refused {why, knob?}

Where the Pilot counts steps for it, ``set`` waits up to 0.5 s for the step that takes the values
over; ``pending`` is true when the engine made none meanwhile (it idles: the values apply before
its next step). Elsewhere ``set`` is answered at once, and ``get`` tells what is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.law import LeaseError
from servoscope.exporters.knobs.pilot import KnobPilot
from servoscope.exporters.plugin.line_server import Connection, LineServer

__all__ = ["KnobHandler", "serve_knobs", "socket_name"]

TICK_SECONDS = 0.25  # how late a lease may end while the engine idles
APPLY_WAIT_SECONDS = 0.5
POLL_SECONDS = 0.005


class KnobHandler:
    """Answers the knobs socket for one Pilot. Runs in the socket's thread only."""

    def __init__(self, pilot: KnobPilot[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._pilot = pilot
        self._law = pilot.law
        self._clock = clock
        self._waiting: list[tuple[Connection, Any, float, int]] = []
        self._connections: list[Connection] = []

    def hello(self) -> dict[str, Any]:
        """Who this is, and the boot values of the knobs."""
        return self._pilot.hello()

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        """One request; exactly one answer."""
        ident = message.get("id")
        try:
            answer = self._answer(connection, message, self._clock())
        except KnobRefusedError as refused:
            answer = {"type": "refused", "why": str(refused), "knob": refused.name}
        except LeaseError as refused:
            answer = {"type": "refused", "why": str(refused)}
        if answer is not None:
            connection.send({"id": ident, **answer})

    def closed(self, connection: Connection) -> None:
        """The lease stays until it runs out: a peer that reconnects in time takes it over."""
        self._waiting = [w for w in self._waiting if w[0] is not connection]

    def tick(self, connections: Iterable[Connection]) -> float:
        """End what was not renewed; answer the sets that a step has taken over."""
        now = self._clock()
        self._law.expire(now)
        still = []
        for connection, ident, until, steps in self._waiting:
            pending = (self._pilot.passed() or 0) <= steps
            if not pending or now >= until or self._idle():
                connection.send({"id": ident, **self._applied(), "pending": pending})
            else:
                still.append((connection, ident, until, steps))
        self._waiting = still
        self._connections = list(connections)
        return POLL_SECONDS if still else TICK_SECONDS

    def _answer(
        self, connection: Connection, message: dict[str, Any], now: float
    ) -> dict[str, Any] | None:
        op = message.get("op")
        if op == "get":
            return self._state(connection, now)
        if why := self._pilot.refuses():
            return {"type": "refused", "why": why}
        if op == "set":
            return self._set(connection, message, now)
        return self._lease_op(connection, message, now)

    def _lease_op(
        self, connection: Connection, message: dict[str, Any], now: float
    ) -> dict[str, Any]:
        op, law = message.get("op"), self._law
        owner = connection.state.get("owner", "")
        if op == "lease":
            owner = str(message.get("owner", ""))
            ttl = law.lease(owner, message.get("ttl_s", 30.0), now)
            connection.state["owner"] = owner
            return {"type": "leased", "ttl_s": ttl}
        if op == "renew":
            return {"type": "leased", "ttl_s": law.renew(owner, now)}
        if op == "bypass" and self._pilot.bypasses:
            law.bypass(owner, bool(message.get("on")), now)
            return {"type": "bypassed", "on": bool(message.get("on"))}
        if op == "release":
            law.release(owner, now)
            return {"type": "released"}
        return {"type": "error", "why": f"unknown op {op!r}"[:200]}

    def _set(
        self, connection: Connection, message: dict[str, Any], now: float
    ) -> dict[str, Any] | None:
        owner = connection.state.get("owner", "")
        values = message.get("values")
        if not isinstance(values, dict) or not values:
            return {"type": "error", "why": "values: an object of knob names and numbers"}
        running, _waiting = self._pilot.counts()
        steps = self._pilot.passed()
        self._law.set(owner, values, now, running)
        if steps is None:
            return self._applied()
        if self._idle():
            return {**self._applied(), "pending": True}
        self._waiting.append((connection, message.get("id"), now + APPLY_WAIT_SECONDS, steps))
        return None  # answered from tick

    def _applied(self) -> dict[str, Any]:
        return {"type": "set", "applied": self._law.asked(self._clock()).as_json()}

    def _idle(self) -> bool:
        return self._pilot.counts() == (0, 0)

    def _state(self, connection: Connection, now: float) -> dict[str, Any]:
        pilot, law = self._pilot, self._law
        running, waiting = pilot.counts()
        holder = law.holder(now)
        return {
            "type": "state",
            "rank": pilot.rank,
            "knobs": self._knobs(now, running),
            "in_force": pilot.in_force(),
            "lease": None if holder is None else {"owner": holder[0], "seconds_left": holder[1]},
            "leases_expired_total": law.expired_total,
            "bypass": law.target.bypass,
            "off": pilot.off,
            "faults": pilot.faults,
            "running": running,
            "waiting": waiting,
            "step_tokens_max": self._take_max(connection),
            **pilot.counters.as_json(),
        }

    def _knobs(self, now: float, running: int) -> dict[str, dict[str, Any]]:
        pilot, bounds = self._pilot, self._pilot.bounds(running)
        values = pilot.shown(now) if bounds else {}
        boot = pilot.envelope.boot.as_json()
        return {
            name: {
                "unit": pilot.units[name],
                "value": values[name],
                "boot": boot[name],
                "minimum": bound.minimum,
                "maximum": bound.maximum,
                "why": bound.why,
            }
            for name, bound in bounds.items()
        }

    def _take_max(self, connection: Connection) -> int:
        """Largest step since this peer asked last: one register a peer, none steals another's."""
        largest = self._pilot.counters.take_step_tokens_max()
        for peer in self._connections:
            peer.state["step_tokens_max"] = max(peer.state.get("step_tokens_max", 0), largest)
        mine = max(int(connection.state.get("step_tokens_max", 0)), largest)
        connection.state["step_tokens_max"] = 0
        return mine


def socket_name(pilot: KnobPilot[Any], pid: int) -> str:
    """The file name of this rank's socket."""
    return f"knobs-{pid}-{pilot.rank_name}.sock"


def serve_knobs(pilot: KnobPilot[Any], directory: Path, group_name: str | None) -> None:
    """Open the socket of this rank and serve it in a thread of its own."""
    path = directory / socket_name(pilot, os.getpid())
    LineServer(path, KnobHandler(pilot), group_name=group_name).start()

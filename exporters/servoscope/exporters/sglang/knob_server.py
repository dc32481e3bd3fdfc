"""The knobs socket of one SGLang scheduler process, one a rank.

``knobs-<pid>-dp<rank>.sock`` is the first rank of a group: it alone takes leases and settings, by
the messages of vllm.knob_server. ``knobs-<pid>-dp<rank>-tp<rank>.sock`` are the others: they only
answer ``get``, so that a setting can be seen to have arrived on every rank.

``set`` is answered at once with the values asked for (and those that go with them); ``get`` tells
the values that the scheduler of this rank uses now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.law import LeaseError
from servoscope.exporters.plugin import facts
from servoscope.exporters.plugin.line_server import Connection, LineServer
from servoscope.exporters.sglang.knob_set import KNOB_UNITS, KnobSet
from servoscope.exporters.sglang.steering import Pilot

__all__ = ["KnobHandler", "serve_knobs", "socket_name"]

TICK_SECONDS = 0.25  # how late a lease may end


class KnobHandler:
    """Answers the knobs socket for one Pilot. Runs in the socket's thread only."""

    def __init__(self, pilot: Pilot, clock: Callable[[], float] = time.monotonic) -> None:
        self._pilot = pilot
        self._clock = clock
        self._connections: list[Connection] = []

    def hello(self) -> dict[str, Any]:
        """Who this is: engine, rank, boot values."""
        pilot, place = self._pilot, self._pilot.place
        boot = {} if pilot.off else pilot.envelope.boot.as_json()
        return facts.hello(
            "sglang",
            boot_values={**boot, "tp_rank": place.tp_rank, "tp_size": place.tp_size},
            missing=[],
            rank=place.dp_rank,
            off=pilot.off,
            model_names=[],
        )

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        """One request; exactly one answer."""
        try:
            answer = self._answer(connection, message, self._clock())
        except KnobRefusedError as refused:
            answer = {"type": "refused", "why": str(refused), "knob": refused.name}
        except LeaseError as refused:
            answer = {"type": "refused", "why": str(refused)}
        connection.send({"id": message.get("id"), **answer})

    def closed(self, _connection: Connection) -> None:
        """The lease stays until it runs out: a peer that reconnects in time takes it over."""

    def tick(self, connections: Iterable[Connection]) -> float:
        """End a lease that was not renewed."""
        self._connections = list(connections)
        if not self._pilot.off:
            self._pilot.law.expire(self._clock())
        return TICK_SECONDS

    def _answer(
        self, connection: Connection, message: dict[str, Any], now: float
    ) -> dict[str, Any]:
        pilot = self._pilot
        if message.get("op") == "get":
            return self._state(connection, now)
        if pilot.off:
            return {"type": "refused", "why": f"knobs are off: {pilot.off}"}
        if not pilot.place.leads:
            return {"type": "refused", "why": "settings go to the first rank of the group"}
        return self._lease_op(connection, message, now)

    def _lease_op(
        self, connection: Connection, message: dict[str, Any], now: float
    ) -> dict[str, Any]:
        op, law = message.get("op"), self._pilot.law
        owner = connection.state.get("owner", "")
        if op == "lease":
            owner = str(message.get("owner", ""))
            ttl = law.lease(owner, message.get("ttl_s", 30.0), now)
            connection.state["owner"] = owner
            return {"type": "leased", "ttl_s": ttl}
        if op == "renew":
            return {"type": "leased", "ttl_s": law.renew(owner, now)}
        if op == "release":
            law.release(owner, now)
            return {"type": "released"}
        if op == "set":
            values = message.get("values")
            if not isinstance(values, dict) or not values:
                return {"type": "error", "why": "values: an object of knob names and numbers"}
            law.set(owner, values, now, 0)
            return {"type": "set", "applied": law.asked(now).as_json()}
        return {"type": "error", "why": f"unknown op {op!r}"[:200]}

    def _state(self, connection: Connection, now: float) -> dict[str, Any]:
        pilot = self._pilot
        running, waiting = pilot.counts()
        holder = None if pilot.off else pilot.law.holder(now)
        return {
            "type": "state",
            "rank": pilot.place.dp_rank,
            "knobs": {} if pilot.off else self._knobs(pilot.values()),
            "in_force": {},
            "lease": None if holder is None else {"owner": holder[0], "seconds_left": holder[1]},
            "leases_expired_total": 0 if pilot.off else pilot.law.expired_total,
            "bypass": False,
            "off": pilot.off,
            "faults": pilot.faults,
            "running": running,
            "waiting": waiting,
            "step_tokens_max": self._take_max(connection),
            **pilot.counters.as_json(),
        }

    def _knobs(self, now: KnobSet) -> dict[str, dict[str, Any]]:
        envelope = self._pilot.envelope
        values, boot = now.as_json(), envelope.boot.as_json()
        return {
            name: {
                "unit": KNOB_UNITS[name],
                "value": values[name],
                "boot": boot[name],
                "minimum": bound.minimum,
                "maximum": bound.maximum,
                "why": bound.why,
            }
            for name, bound in envelope.bounds().items()
        }

    def _take_max(self, connection: Connection) -> int:
        """Largest step since this peer asked last: one register a peer, none steals another's."""
        largest = self._pilot.counters.take_step_tokens_max()
        for peer in self._connections:
            peer.state["step_tokens_max"] = max(peer.state.get("step_tokens_max", 0), largest)
        mine = max(int(connection.state.get("step_tokens_max", 0)), largest)
        connection.state["step_tokens_max"] = 0
        return mine


def socket_name(pilot: Pilot, pid: int) -> str:
    """The file name of this rank's socket."""
    place = pilot.place
    rank = "" if place.leads else f"-tp{place.tp_rank}"
    return f"knobs-{pid}-dp{place.dp_rank}{rank}.sock"


def serve_knobs(pilot: Pilot, directory: Path, group_name: str | None) -> LineServer:
    """Open the socket of this rank and serve it in a thread of its own."""
    path = directory / socket_name(pilot, os.getpid())
    server = LineServer(path, KnobHandler(pilot), group_name=group_name)
    server.start()
    return server

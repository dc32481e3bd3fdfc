"""The knobs socket of one engine core: ``knobs-<pid>-dp<rank>.sock``.

Requests are JSON lines ``{"id": any, "op": ...}``; each gets one answer with the same ``id``.

    get                          -> state
    lease {owner, ttl_s}         -> leased {ttl_s}
    renew                        -> leased {ttl_s}
    set {values: {knob: value}}  -> set {applied, pending}   the values the next step uses
    release                      -> released
    bypass {on}                  -> bypassed {on}            lease holder only
    anything refused             -> refused {why, knob?}

``set`` waits up to 0.5 s for the step that takes the values over; ``pending`` is true when the
engine made no step meanwhile (it idles: the values apply in add_request, before the next step).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.law import LeaseError
from servoscope.exporters.plugin.line_server import Connection, LineServer
from servoscope.exporters.vllm import facts
from servoscope.exporters.vllm.knob_set import KNOB_UNITS
from servoscope.exporters.vllm.scheduler import Pilot, rank_of

__all__ = ["KnobHandler", "serve_knobs"]

TICK_SECONDS = 0.25  # how late a lease may end while the engine idles
APPLY_WAIT_SECONDS = 0.5
POLL_SECONDS = 0.005


class KnobHandler:
    """Answers the knobs socket for one Pilot. Runs in the socket's thread only."""

    def __init__(
        self, pilot: Pilot, vllm_config: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pilot = pilot
        self._law = pilot.law
        self._clock = clock
        self._config = vllm_config
        self._rank = rank_of(pilot.scheduler)
        self._waiting: list[tuple[Connection, Any, float, int]] = []
        self._connections: list[Connection] = []

    def hello(self) -> dict[str, Any]:
        """Who this is, and the boot values of the knobs."""
        return facts.hello(
            self._config,
            boot_values=self._law.envelope.boot.as_json(),
            missing=self._pilot.missing,
            rank=self._rank,
            off=self._pilot.off,
        )

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
            if self._passed() > steps or now >= until or self._idle():
                connection.send({"id": ident, **self._applied(self._passed() <= steps)})
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
        if self._pilot.off:
            return {"type": "refused", "why": f"knobs are off: {self._pilot.off}"}
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
        if op == "bypass":
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
        steps = self._passed()
        self._law.set(owner, values, now, running)
        if self._idle():
            return self._applied(pending=True)
        self._waiting.append((connection, message.get("id"), now + APPLY_WAIT_SECONDS, steps))
        return None  # answered from tick

    def _applied(self, pending: bool) -> dict[str, Any]:
        return {
            "type": "set",
            "applied": self._law.asked(self._clock()).as_json(),
            "pending": pending,
        }

    def _passed(self) -> int:
        counters = self._pilot.counters
        return counters.steps + counters.empty_steps

    def _idle(self) -> bool:
        return self._pilot.counts() == (0, 0)

    def _state(self, connection: Connection, now: float) -> dict[str, Any]:
        pilot, envelope = self._pilot, self._law.envelope
        running, waiting = pilot.counts()
        holder, values = self._law.holder(now), self._law.asked(now).as_json()
        knobs = {
            name: {
                "unit": KNOB_UNITS[name],
                "value": values[name],
                "boot": envelope.boot.as_json()[name],
                "minimum": bound.minimum,
                "maximum": bound.maximum,
                "why": pilot.off or bound.why,
            }
            for name, bound in envelope.bounds(running).items()
        }
        return {
            "type": "state",
            "rank": self._rank,
            "knobs": knobs,
            "in_force": {} if pilot.missing else self._in_force(),
            "lease": None if holder is None else {"owner": holder[0], "seconds_left": holder[1]},
            "leases_expired_total": self._law.expired_total,
            "bypass": self._law.target.bypass,
            "off": pilot.off,
            "faults": pilot.faults,
            "running": running,
            "waiting": waiting,
            "step_tokens_max": self._take_max(connection),
            **pilot.counters.as_json(),
        }

    def _in_force(self) -> dict[str, int]:
        """The scheduler's attributes as they are this moment (they follow at the next step)."""
        scheduler = self._pilot.scheduler
        config = scheduler.scheduler_config
        return {
            "chunk_tokens": int(scheduler.max_num_scheduled_tokens),
            "long_prefill_threshold_tokens": int(config.long_prefill_token_threshold),
            "max_running_requests": int(getattr(scheduler, self._pilot.slots)),
        }

    def _take_max(self, connection: Connection) -> int:
        """Largest step since this peer asked last: one register a peer, none steals another's."""
        largest = self._pilot.counters.take_step_tokens_max()
        for peer in self._connections:
            peer.state["step_tokens_max"] = max(peer.state.get("step_tokens_max", 0), largest)
        mine = max(int(connection.state.get("step_tokens_max", 0)), largest)
        connection.state["step_tokens_max"] = 0
        return mine


def serve_knobs(directory: Path, group_name: str | None) -> Callable[[Pilot], None]:
    """A function that opens the socket for a Pilot (called in the engine core)."""

    def serve(pilot: Pilot) -> None:
        handler = KnobHandler(pilot, getattr(pilot.scheduler, "vllm_config", None))
        name = f"knobs-{os.getpid()}-dp{rank_of(pilot.scheduler)}.sock"
        LineServer(directory / name, handler, group_name=group_name).start()

    return serve

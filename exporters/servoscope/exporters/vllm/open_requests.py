"""Requests in flight in one API server, and the phase each is in.

vLLM tells the API server "queued" and "scheduled" only together with the first output. Before
that the phase is estimated from the scheduler's own count of waiting requests, which comes with
every step: under first-come-first-served the youngest ``waiting`` of the requests without a token
are queued. It is exact when none waits or all do. Decoding is always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from servoscope.exporters.records import Phase
from servoscope.exporters.vllm.http_exchange import HttpExchange
from servoscope.exporters.vllm.request_parts import Part, lora_of

__all__ = ["Call", "OpenRequest", "Waiting", "estimated_phases", "http_of", "listed"]


@dataclass(slots=True)
class Call:
    """One HTTP request: all engine requests that serve it.

    ``received`` is its start, wall clock: of the HTTP server (``by_http``), else of the engine.
    """

    ident: str
    received: float | None = None
    by_http: bool = False
    http: HttpExchange | None = None
    indices: set[int] = field(default_factory=set)
    open: int = 0
    parts: list[Part] = field(default_factory=list)
    estimated: bool = False


@dataclass(slots=True)
class OpenRequest:
    """One engine request in flight. ``state`` is vLLM's RequestState."""

    state: Any
    call: Call
    processor: Any
    prompt_index: int = 0
    priority: int = 0

    @property
    def arrival(self) -> float:
        """The engine's own stamp, wall-clock seconds: its queue is in this order."""
        return float(self.state.stats.arrival_time)

    @property
    def received(self) -> float:
        """When the HTTP request was received, wall-clock seconds."""
        return self.arrival if self.call.received is None else self.call.received


@dataclass(slots=True)
class Waiting:
    """What the scheduler last said: requests waiting (by rank), and when (wall clock)."""

    by_rank: dict[int, int] = field(default_factory=dict)
    at: float = 0.0

    def heard(self, rank: int, waiting: int, at: float) -> None:
        """The count that came with a step."""
        self.by_rank[rank] = waiting
        self.at = at

    @property
    def total(self) -> int:
        """Over all ranks."""
        return sum(self.by_rank.values())


def estimated_phases(
    requests: Sequence[tuple[float, bool]], waiting: int, at: float
) -> list[Phase]:
    """Phase of each request in flight, given as (arrival, has a token already).

    ``waiting`` and ``at`` are the scheduler's last count and when it came. A request younger than
    that has not been seen by the scheduler: it waits for the running step, if there is one.
    """
    seen = sorted(arrival for arrival, token in requests if not token and arrival <= at)
    oldest = min((arrival for arrival, _token in requests), default=0.0)
    # Of those the scheduler has seen, the youngest ``waiting`` have not been scheduled.
    first_waiting = seen[max(0, len(seen) - waiting)] if waiting > 0 and seen else None
    decided: list[Phase] = []
    for arrival, token in requests:
        if token:
            phase = Phase.DECODE
        elif arrival > at:
            phase = Phase.QUEUED if waiting > 0 or oldest < arrival else Phase.PREFILL
        elif first_waiting is not None and arrival >= first_waiting:
            phase = Phase.QUEUED
        else:
            phase = Phase.PREFILL
        decided.append(phase)
    return decided


def http_of(call: Call) -> dict[str, Any]:
    """What the HTTP request itself said; the path it came to is truer than a guess by its id."""
    said: dict[str, Any] = {"received_by": "http" if call.by_http else "engine"}
    if (exchange := call.http) is not None:
        said |= {"request_type_hint": exchange.hint, "tenant": exchange.tenant}
        if exchange.endpoint is not None:
            said["endpoint"] = exchange.endpoint
    return said


def listed(request: OpenRequest, phase: Phase) -> dict[str, Any]:
    """A request in flight as the reader is told."""
    http = request.call.http
    return {
        "request_id": request.call.ident,
        "phase": phase.value,
        "prompt_tokens": getattr(request.state, "prompt_len", None),
        "received_unix_seconds": request.received,
        "lora": lora_of(request.state),
        "request_type_hint": None if http is None else http.hint,
    }

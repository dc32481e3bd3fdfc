"""Follows every request in an API server from registration to its end, exactly once each.

vLLM keeps what we need on OutputProcessor.request_states. We are told of four moments:
``add_request``, ``_update_stats_from_finished``, ``abort_requests`` and ``propagate_error``; an
end is recorded only if it takes the request out of our own table, so whichever of them comes
second finds nothing. All methods run in the engine's thread except ``snapshot``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from servoscope.exporters.records import Outcome, Phase
from servoscope.exporters.vllm.delivery import Delivery
from servoscope.exporters.vllm.http_exchange import HttpExchange, current_exchange
from servoscope.exporters.vllm.open_requests import (
    Call,
    OpenRequest,
    Waiting,
    estimated_phases,
    http_of,
    listed,
)
from servoscope.exporters.vllm.request_parts import (
    endpoint_of,
    is_beam,
    merged,
    outcome_of_finish,
    part_of,
    response_id,
    streaming_of,
)

__all__ = ["Lifecycle"]

#: More open requests than this are swept against vLLM's own table (a version that ends requests
#: in a way we do not see must not make us grow).
SWEEP_ABOVE = 4096
MAX_LISTED = 1000
#: An HTTP start later than the engine's stamp, or this much before it, is not believed.
MAX_BEFORE_ARRIVAL_SECONDS = 600.0


class Lifecycle:
    """Requests in flight, and a message for each that ends.

    ``emit`` takes a finished message. ``ranks`` is the number of engine cores behind this API
    server: with one, every request is of ``first_rank``; with several, the rank is known only
    when ``stepped`` is called for the batch of outputs that held the end. ``exchange`` tells the
    HTTP request that the calling task serves.
    """

    def __init__(
        self,
        emit: Callable[[dict[str, Any]], None],
        *,
        ranks: int = 1,
        first_rank: int = 0,
        clock: Callable[[], float] = time.time,
        exchange: Callable[[], HttpExchange | None] = current_exchange,
    ) -> None:
        self._emit = emit
        self.delivery = Delivery(emit, ranks=ranks)
        self._rank = first_rank if ranks == 1 else None
        self._clock = clock
        self._exchange = exchange
        self._open: dict[str, OpenRequest] = {}
        self._numbered: dict[str, Call] = {}
        self._waiting = Waiting()
        self.lost = 0  # swept: ended in a way that no hook saw
        self.beams = 0  # engine requests of beam searches, left out of the records
        self.rejected = 0
        self.http_watched = False  # the HTTP server is wrapped
        self.http_starts = 0  # requests that start when the HTTP server had them
        self.engine_starts = 0  # those of which only the engine's stamp is known
        self.odd_starts = 0  # of the latter: the HTTP server's stamp made no sense
        self.announcing = False  # somebody reads: keep what ``take_opened`` hands out
        self._opened: deque[dict[str, Any]] = deque(maxlen=MAX_LISTED)

    @property
    def received_by(self) -> str:
        """Whose clock starts a request: ``http``, or ``engine`` where that is not to be had."""
        seen = self.http_starts > 0 or self.engine_starts == 0
        return "http" if self.http_watched and seen else "engine"

    @property
    def ttft_by(self) -> str:
        """Whose clock ends TTFT of streamed answers: ``http`` or ``engine``, likewise."""
        return self.delivery.ttft_by if self.http_watched else "engine"

    def registered(self, processor: Any, request: Any) -> None:
        """``OutputProcessor.add_request`` has returned."""
        ident = request.request_id
        if ident in self._open:
            return  # another chunk of a streaming-input session
        state = processor.request_states.get(ident)
        if state is None or state.stats is None:
            return
        external = str(getattr(state, "external_req_id", None) or ident)
        parent = getattr(state, "parent_req", None)
        if parent is not None:  # before 0.20 a sample's own id carries its number in front
            external = str(getattr(parent, "external_req_id", None) or parent.request_id)
        if is_beam(external):
            self.beams += 1
            return
        call, index = self._call_of(external, parent)
        call.open += 1
        if len(self._open) >= SWEEP_ABOVE:
            self._sweep()
        found = OpenRequest(
            state, call, processor, index, int(getattr(request, "priority", 0) or 0)
        )
        self._open[ident] = found
        begins = call.received is None
        if begins:
            self._begin(call, found.arrival)
        if call.http is not None and call.by_http and streaming_of(state):
            call.http.watch(state)
        if begins and self.announcing:
            # As estimated_phases says of a request that the scheduler has not seen yet.
            busy = self._waiting.total > 0 or len(self._open) > 1
            self._opened.append(listed(found, Phase.QUEUED if busy else Phase.PREFILL))

    def finished(self, state: Any, finish_reason: Any, iteration_stats: Any) -> None:
        """``_update_stats_from_finished`` has returned."""
        found = self._open.pop(state.request_id, None)
        if found is None:
            return
        reason = str(finish_reason)
        at = getattr(iteration_stats, "iteration_timestamp", None) or self._clock()
        phase = Phase.DECODE if state.stats.num_generation_tokens else Phase.PREFILL
        self._end(
            found,
            outcome=outcome_of_finish(reason),
            phase=phase,
            reason=reason,
            at=at,
            iteration_stats=iteration_stats,
        )

    def aborted(self, idents: Iterable[str], outcome: Outcome) -> None:
        """``abort_requests`` has returned these internal ids."""
        at = self._clock()
        wanted = [i for i in idents if i in self._open]
        if not wanted:
            return
        phases = dict(self._phases())  # before they leave: the others decide who was queued
        for ident in wanted:
            found = self._open.pop(ident)
            phase = phases.get(ident, Phase.UNKNOWN)
            found.call.estimated |= phase is not Phase.DECODE
            self._end(found, outcome=outcome, phase=phase, reason="abort", at=at)

    def failed(self, processor: Any) -> None:
        """``propagate_error``: the engine died under every request of this processor."""
        phases = dict(self._phases())
        at = self._clock()
        for ident in [i for i, r in self._open.items() if r.processor is processor]:
            found = self._open.pop(ident)
            self._end(found, outcome=Outcome.ERROR, phase=phases[ident], reason="error", at=at)

    def refused(self, ident: str | None) -> None:
        """Admission control said no (HTTP 503): the request never entered the engine."""
        self.rejected += 1
        at = self._clock()
        call = Call(response_id(ident)[0] if ident else f"rejected-{self.rejected}")
        self._begin(call, at)
        self._emit(
            {
                "type": "record",
                "request_id": call.ident,
                "endpoint": endpoint_of(ident) if ident else None,
                "outcome": Outcome.REJECTED.value,
                "phase": Phase.QUEUED.value,
                "status_code": 503,
                "rank": None,
                "received_unix_seconds": call.received,
                "finished_unix_seconds": at,
                "e2e_seconds": at - (call.received or at),
                **http_of(call),
            }
        )

    def stepped(self, rank: int, scheduler_stats: Any, iteration_stats: Any) -> None:
        """``StatLogger.record``: one batch of outputs of one rank was handled."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs
            waiting += getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
            self._waiting.heard(rank, waiting, self._clock())
        self.delivery.stepped(rank, iteration_stats)

    def snapshot(self) -> tuple[list[dict[str, Any]], int]:
        """HTTP requests in flight, MAX_LISTED at most, and how many there are. Any thread."""
        calls: dict[int, dict[str, Any]] = {}
        order = (Phase.QUEUED, Phase.PREFILL, Phase.DECODE)
        for request, phase in self._requests_and_phases():
            known = calls.get(id(request.call))
            if known is None:
                calls[id(request.call)] = listed(request, phase)
            elif order.index(phase) > order.index(Phase(known["phase"])):
                known["phase"] = phase.value
        return list(calls.values())[:MAX_LISTED], len(calls)

    def take_opened(self) -> list[dict[str, Any]]:
        """Requests that came since the last call, the newest MAX_LISTED. Any one thread."""
        return [self._opened.popleft() for _ in range(len(self._opened))]

    def __len__(self) -> int:
        return len(self._open)

    def _begin(self, call: Call, arrival: float) -> None:
        """Decide when ``call`` was received; ``arrival`` is the engine's own stamp.

        A later turn of the same POST (the responses API with tools) was not received again, and
        it did not wait since then: its start is the engine's.
        """
        call.received = arrival
        exchange = call.http = self._exchange()
        if exchange is not None and exchange.received is not None and not exchange.spent:
            if 0.0 <= arrival - exchange.received <= MAX_BEFORE_ARRIVAL_SECONDS:
                call.received, call.by_http = exchange.received, True
                self.http_starts += 1
                return
            self.odd_starts += 1
        self.engine_starts += 1

    def _requests_and_phases(self) -> list[tuple[OpenRequest, Phase]]:
        requests = list(self._open.values())  # one C call: atomic beside the engine's thread
        known = [(r.arrival, not r.state.is_prefilling) for r in requests]
        phases = estimated_phases(known, self._waiting.total, self._waiting.at)
        return list(zip(requests, phases, strict=True))

    def _phases(self) -> list[tuple[str, Phase]]:
        return [(r.state.request_id, phase) for r, phase in self._requests_and_phases()]

    def _call_of(self, external: str, parent: Any) -> tuple[Call, int]:
        """The HTTP request that an engine request belongs to, and the number of its prompt."""
        ident, index = response_id(external)
        if parent is not None and (known := getattr(parent, "servoscope_call", None)) is not None:
            return known, index or 0
        call = None
        if index:  # prompt 1, 2, ... of a list joins prompt 0, unless another list has the same id
            call = self._numbered.get(ident)
            if call is not None and index in call.indices:
                call = None
        if call is None:
            call = Call(ident)
            if index is not None:
                self._numbered[ident] = call
        if index is not None:
            call.indices.add(index)
        if parent is not None:
            parent.servoscope_call = call
        return call, index or 0

    def _end(
        self,
        found: OpenRequest,
        *,
        outcome: Outcome,
        phase: Phase,
        reason: str,
        at: float,
        iteration_stats: Any = None,
    ) -> None:
        call = found.call
        call.open -= 1
        call.parts.append(
            part_of(
                found.state,
                outcome=outcome,
                phase=phase,
                finish_reason=reason,
                finished=at,
                received=found.received,
                priority=found.priority,
                prompt_index=found.prompt_index,
            )
        )
        if call.open > 0:
            return
        if self._numbered.get(call.ident) is call:
            del self._numbered[call.ident]
        if call.http is not None:
            call.http.spent = True
        message = merged(call.parts, call.ident, rank=self._rank, estimated=call.estimated)
        message.update(http_of(call))
        self.delivery.ended(message, call, iteration_stats)

    def _sweep(self) -> None:
        """Forget what vLLM itself no longer has (engine's thread only, so nothing is mid-way)."""
        gone = [i for i, r in self._open.items() if i not in r.processor.request_states]
        for ident in gone:
            call = self._open.pop(ident).call
            call.open -= 1
            if self._numbered.get(call.ident) is call:
                del self._numbered[call.ident]
        self.lost += len(gone)

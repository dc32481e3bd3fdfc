"""Finished requests on their way to the buffer: each leaves once, with what is known by then.

A message may have to wait for two things that come after its request's end in the engine:

- its rank, where there are several: ``stepped`` is called for the batch of outputs that held the
  end, and until then the message hangs on that batch's IterationStats;
- the first chunk of a streamed answer, where the engine was done before anything was sent (short
  answers; a busy HTTP server): until then the message is held by its POST (http_exchange), which
  gives it back at that chunk or at the end of the call, whichever is first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from servoscope.exporters.vllm.open_requests import Call

__all__ = ["Delivery", "first_token_at"]

PENDING_ATTRIBUTE = "servoscope_pending"


class Delivery:
    """``emit`` takes a message that is complete; ``ranks`` is the number of engine cores."""

    def __init__(self, emit: Callable[[dict[str, Any]], None], *, ranks: int = 1) -> None:
        self._emit = emit
        self._ranks = ranks
        self.http_firsts = 0  # first tokens of streamed answers that end at the first chunk's send
        self.engine_firsts = 0  # those of streamed answers that end at the engine's output

    @property
    def ttft_by(self) -> str:
        """Whose clock ends TTFT of streamed answers, as far as was seen: ``http``, ``engine``."""
        return "http" if self.http_firsts > 0 or self.engine_firsts == 0 else "engine"

    def ended(self, message: dict[str, Any], call: Call, iteration_stats: Any = None) -> None:
        """All engine requests of ``call`` have ended; ``iteration_stats``: in this batch."""
        if self._ranks > 1 and iteration_stats is not None:
            pending = getattr(iteration_stats, PENDING_ATTRIBUTE, None)
            if pending is None:
                pending = []
                setattr(iteration_stats, PENDING_ATTRIBUTE, pending)
            pending.append((message, call))
        else:
            self._deliver(message, call)

    def stepped(self, rank: int, iteration_stats: Any) -> None:
        """The batch is through: its ends were on ``rank``."""
        if self._ranks > 1 and iteration_stats is not None:
            pending = getattr(iteration_stats, PENDING_ATTRIBUTE, [])
            while pending:
                message, call = pending.pop(0)
                message["rank"] = rank
                self._deliver(message, call)

    def _deliver(self, message: dict[str, Any], call: Call) -> None:
        exchange = call.http
        if exchange is None or not (call.by_http and message["streaming"]):
            self._emit(message)
        elif message["first_token_unix_seconds"] is None:
            self._emit(message)  # it ended before that: nothing to wait for
        elif not exchange.hold(partial(self._sent, message, call)):
            self._sent(message, call)

    def _sent(self, message: dict[str, Any], call: Call) -> None:
        """The first chunk was sent, or it never will be."""
        at = None if call.http is None else call.http.first_sent
        if first_token_at(message, at):
            self.http_firsts += 1
        else:
            self.engine_firsts += 1
        self._emit(message)


def first_token_at(message: dict[str, Any], at: float | None) -> bool:
    """Move the first token of ``message`` to ``at``, when its chunk was sent (wall clock).

    False, and nothing is changed, without such a stamp or with one before the engine's own: the
    clock was set back, or the chunk was another request's of the same POST. A request that had
    ended in the engine before its first chunk was sent ended for its client no earlier than that.
    """
    first = message["first_token_unix_seconds"]
    if at is None or first is None or at < first:
        return False
    received = message["received_unix_seconds"]
    finished = max(message["finished_unix_seconds"], at)
    message.update(
        ttft_by="http",
        first_token_unix_seconds=at,
        time_to_first_token_seconds=at - received,
        finished_unix_seconds=finished,
        e2e_seconds=finished - received,
    )
    return True

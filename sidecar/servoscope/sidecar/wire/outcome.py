"""How a request ended, from what the wire showed. Pure; the table of docs/architecture.md."""

from __future__ import annotations

from enum import StrEnum

from servoscope.exporters.records import Outcome, Phase
from servoscope.sidecar.wire.answer import Answer

__all__ = ["End", "classify", "phase_of"]

_TIMEOUTS = (408, 504)
_REJECTIONS = (429, 503)
_BY_REASON = {
    "length": Outcome.LENGTH,
    "abort": Outcome.CANCELLED,
    "cancelled": Outcome.CANCELLED,
    "error": Outcome.ERROR,
}


class End(StrEnum):
    """What ended our view of a request."""

    COMPLETE = "complete"  # the response was sent whole
    CLIENT_CLOSED = "client_closed"
    SERVER_CLOSED = "server_closed"
    LOST = "lost"  # packets or bytes that we could not see or read


def classify(end: End, status: int | None, answer: Answer, *, ends_marked: bool) -> Outcome:
    """The outcome. ``ends_marked``: a whole answer carries a finish reason that we could read.

    A status above 399 decides at once, whatever happened to its body. A stream whose last event
    was seen is complete also when the client left before the last bytes of the HTTP framing.
    """
    if status is not None and status >= 300:
        return _by_status(status)
    if answer.error and end is not End.CLIENT_CLOSED:
        return Outcome.ERROR
    if status is not None and (end is End.COMPLETE or answer.terminal_at is not None):
        if answer.finish_reason is not None:
            return _BY_REASON.get(answer.finish_reason, Outcome.COMPLETED)
        cut = ends_marked and answer.terminal_at is None
        return Outcome.ERROR if cut else Outcome.COMPLETED
    if end is End.CLIENT_CLOSED:
        return Outcome.CLIENT_DISCONNECT
    return Outcome.ERROR if end is End.SERVER_CLOSED else Outcome.UNKNOWN


def _by_status(status: int) -> Outcome:
    if status in _REJECTIONS:
        return Outcome.REJECTED
    if status in _TIMEOUTS:
        return Outcome.TIMEOUT
    # A redirect is like a 4xx: the client asked in the wrong place, and asks again elsewhere.
    return Outcome.ERROR if status >= 500 else Outcome.CLIENT_ERROR


def phase_of(outcome: Outcome | None, answer: Answer) -> Phase:
    """The phase in which a request ended, or is in now (``outcome`` None).

    Before the first token the wire cannot tell queueing from prefill, except where the engine
    reports its progress on the prompt; then it is UNKNOWN, not a guess.
    """
    if outcome is Outcome.REJECTED:
        return Phase.QUEUED
    if answer.first_token_at is not None or outcome in (Outcome.COMPLETED, Outcome.LENGTH):
        return Phase.DECODE
    return Phase.PREFILL if answer.progress else Phase.UNKNOWN

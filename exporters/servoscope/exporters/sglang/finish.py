"""How a request of SGLang ended, from its ``finish_reason``: one rule for all sources. Pure.

Read in 0.5.6.post2, 0.5.9, 0.5.12 and 0.5.23. ``{"type": "stop"}`` and ``{"type": "length"}`` are
answers; ``{"type": "abort", "message", "status_code", "err_type"}`` is everything else. An abort
without a status is one that somebody asked for: the client went away (the engine itself asks, two
seconds after a stream was closed), or /abort_request was called; over HTTP the engine does not say
which (known fault 2), so without a word on it they are ``cancelled``. Only the kind is kept: a
message may quote what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.exporters.records import Outcome

__all__ = ["outcome_of"]

_ANSWERS = {"stop": Outcome.COMPLETED, "length": Outcome.LENGTH}
_REFUSALS = frozenset({429, 503})
_CLIENT_ERRORS = range(400, 500)
_FAILURES = range(500, 600)


def outcome_of(reason: object) -> tuple[Outcome, str | None, int | None]:
    """(outcome, finish reason in one word, HTTP status where the engine set one).

    ``reason`` is the JSON value, or only its type. Raises ValueError for one that is none we know.
    """
    told: Mapping[str, Any] = reason if isinstance(reason, Mapping) else {"type": reason}
    kind = told.get("type")
    if kind is None:
        return Outcome.COMPLETED, None, None  # embeddings and scores have no reason
    if isinstance(kind, str) and kind in _ANSWERS:
        return _ANSWERS[kind], kind, None
    if kind != "abort":
        raise ValueError("finish_reason.type: none we know")
    status = told.get("status_code")
    code = status if isinstance(status, int) and not isinstance(status, bool) else None
    message = told.get("message")
    return _aborted(code, message.lower() if isinstance(message, str) else ""), "abort", code


def _aborted(code: int | None, message: str) -> Outcome:
    """An abort by its status, and by the words of the engine's own messages."""
    if "timeout reached" in message or "timed out" in message:
        return Outcome.TIMEOUT  # SGLANG_REQ_WAITING_TIMEOUT, SGLANG_REQ_RUNNING_TIMEOUT: status 503
    if code in _REFUSALS or "queue is full" in message:
        return Outcome.REJECTED
    if code in _CLIENT_ERRORS:
        return Outcome.CLIENT_ERROR
    if code in _FAILURES:
        return Outcome.ERROR
    if "disconnect" in message:
        return Outcome.CLIENT_DISCONNECT
    return Outcome.CANCELLED

"""OpenAI's Responses API: typed events; tokens are the ``*.delta`` ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.dialects.llamacpp import read_timings

__all__ = ["read"]

_ENDINGS = {
    "response.completed": "stop",
    "response.incomplete": "length",
    "response.failed": "error",
    "response.cancelled": "cancelled",
}


def read(event: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """One event of a stream (``at``: when it came), or a whole answer (``at`` None)."""
    kind = event.get("type")
    if at is None or not isinstance(kind, str):
        _response(event, answer, None)
        return
    if kind == "error":
        answer.error = True
    elif kind.endswith(".delta"):
        if event.get("delta"):
            answer.token(at, answer="reasoning" not in kind)
    elif isinstance(response := event.get("response"), Mapping):
        if isinstance(timings := event.get("timings"), Mapping):
            read_timings(timings, answer)
        _response(response, answer, at if kind in _ENDINGS else None)


def _response(response: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """The ``response`` object of created, completed, failed…; also the whole answer."""
    if response.get("error"):
        answer.error = True
    answer.identify(response.get("id"), response.get("model"))
    usage = response.get("usage")
    if isinstance(usage, Mapping):
        details = usage.get("input_tokens_details")
        answer.usage(
            usage.get("input_tokens"),
            usage.get("output_tokens"),
            details.get("cached_tokens") if isinstance(details, Mapping) else None,
        )
    reason = _ENDINGS.get(f"response.{response.get('status')}")
    if reason is None:
        return
    if reason == "length":
        details = response.get("incomplete_details")
        why = details.get("reason") if isinstance(details, Mapping) else None
        reason = "length" if why in (None, "max_output_tokens") else str(why)
    answer.finish(reason, at)

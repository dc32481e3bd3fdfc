"""Anthropic's Messages API, which vLLM and llama.cpp serve too under ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.sidecar.wire.answer import Answer, count

__all__ = ["read"]

_REASONS = {"max_tokens": "length", "end_turn": "stop", "stop_sequence": "stop"}


def read(event: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """One event of a stream (``at``: when it came), or a whole answer (``at`` None)."""
    kind = event.get("type")
    if kind == "error" or event.get("error"):
        answer.error = True
    elif kind == "message_start" and isinstance(message := event.get("message"), Mapping):
        _message(message, answer, at)
    elif kind == "message":
        _message(event, answer, at)
    elif kind == "content_block_delta":
        _delta(event.get("delta"), answer, at)
    elif kind == "message_delta":
        _usage(event.get("usage"), answer)
        delta = event.get("delta")
        _reason(delta.get("stop_reason") if isinstance(delta, Mapping) else None, answer, at)


def _message(message: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    answer.identify(message.get("id"), message.get("model"))
    _usage(message.get("usage"), answer)
    _reason(message.get("stop_reason"), answer, at)


def _delta(delta: object, answer: Answer, at: float | None) -> None:
    """Text, thinking or tool input; a signature is no token."""
    if at is None or not isinstance(delta, Mapping):
        return
    if delta.get("text") or delta.get("partial_json"):
        answer.token(at, answer=True)
    elif delta.get("thinking"):
        answer.token(at, answer=False)


def _usage(usage: object, answer: Answer) -> None:
    """``input_tokens`` leaves out what was read from the cache: the prompt is their sum."""
    if not isinstance(usage, Mapping):
        return
    cached = count(usage.get("cache_read_input_tokens"), None)
    prompt = count(usage.get("input_tokens"), None)
    if prompt is not None:
        prompt += cached or 0
    answer.usage(prompt, usage.get("output_tokens"), cached)


def _reason(reason: object, answer: Answer, at: float | None) -> None:
    if isinstance(reason, str):
        answer.finish(_REASONS.get(reason, reason), at)

"""OpenAI's chat completions, completions and the endpoints without generated tokens.

Which event carries a token (docs/architecture.md, "Interval definitions"): any choice with text,
content, reasoning, tool calls or token ids; also a choice with *empty* text, no role and no finish
reason: vLLM sends those for a token whose bytes are still an incomplete UTF-8 sequence. Never the
role chunk, a ``prompt_progress`` event or the usage chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.dialects.llamacpp import read_timings

__all__ = ["read", "read_answer"]

_REASONING, _ANSWER = 1, 2
_ANSWER_KEYS = ("content", "text", "tool_calls", "function_call", "refusal", "audio")
_REASONING_KEYS = ("reasoning_content", "reasoning")


def read(event: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """One event of a stream (``at``: when it came), or a whole answer (``at`` None)."""
    if event.get("error"):
        answer.error = True
        return
    if answer.response_id is None:
        answer.identify(event.get("id"), event.get("model"))
    progress = "prompt_progress" in event
    answer.progress = answer.progress or progress
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        _choices(choices, answer, None if progress else at)
    _usage(event, answer)


def read_answer(event: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """An answer without generated tokens (embeddings, rerank, score): id, model and usage."""
    if event.get("error"):
        answer.error = True
        return
    answer.identify(event.get("id"), event.get("model"))
    _usage(event, answer)
    if at is not None:
        answer.terminal_at = at


def _usage(event: Mapping[str, Any], answer: Answer) -> None:
    """``usage`` (OpenAI) and ``timings`` (llama.cpp); the latest of a stream is in force."""
    usage = event.get("usage")
    if isinstance(usage, Mapping):
        details = usage.get("prompt_tokens_details")
        answer.usage(
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            details.get("cached_tokens") if isinstance(details, Mapping) else None,
        )
    timings = event.get("timings")
    if isinstance(timings, Mapping):
        read_timings(timings, answer, _choice_of(event, answer))


def _choice_of(event: Mapping[str, Any], answer: Answer) -> int:
    """Which choice an event's timings are of: its only one, else the one that ended last."""
    choices = event.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping):
        return answer.sequence(choices[0].get("index"))
    return answer.last_finished


def _choices(choices: list[Any], answer: Answer, at: float | None) -> None:
    """All choices of one event: at most one token event, however many choices carry tokens."""
    carried = 0
    ended: list[tuple[object, int]] = []
    for choice in choices:
        if not isinstance(choice, Mapping):
            continue
        sequence = answer.sequence(choice.get("index"))
        carried = max(carried, _carries(choice))
        if (reason := choice.get("finish_reason")) is not None:
            ended.append((reason, sequence))
    if carried and at is not None:
        answer.token(at, answer=carried == _ANSWER)
    for reason, sequence in ended:
        answer.finish(reason, at, sequence)


def _carries(choice: Mapping[str, Any]) -> int:
    """0, _REASONING or _ANSWER: whether, and of which kind, the choice carries a token."""
    delta = choice.get("delta")
    part: Mapping[str, Any] = delta if isinstance(delta, Mapping) else choice
    blank = False
    for key in _ANSWER_KEYS:
        value = part.get(key)
        if value:
            return _ANSWER
        blank = blank or value == ""
    for key in _REASONING_KEYS:
        value = part.get(key)
        if value:
            return _REASONING
        blank = blank or value == ""
    if part.get("token_ids") or choice.get("token_ids"):
        return _REASONING  # a token without text: not yet part of a readable answer
    held_back = blank and not part.get("role") and choice.get("finish_reason") is None
    return _REASONING if held_back else 0

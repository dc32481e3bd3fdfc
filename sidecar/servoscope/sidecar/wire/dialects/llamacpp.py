"""llama.cpp's own ``/completion`` and the ``timings`` that it adds to every dialect.

Facts from the server at build b11549: ``prompt_ms`` runs from the start of the prompt's processing
to the first sampled token, ``predicted_ms`` from there to the last; ``prompt_n`` leaves out the
tokens found in the cache, ``cache_n`` are those. Events are not tokens (incomplete UTF-8 is held
back), so counts come from ``timings`` or ``tokens_predicted`` only. With ``return_progress`` events
with ``prompt_progress`` come before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.sidecar.wire.answer import Answer, count, milliseconds

__all__ = ["read", "read_timings"]


def read(event: Mapping[str, Any], answer: Answer, at: float | None) -> None:
    """One event of ``/completion`` (``at``: when it came), or a whole answer (``at`` None)."""
    if event.get("error"):
        answer.error = True
        return
    answer.identify(None, event.get("model"))
    sequence = answer.sequence(event.get("index"))
    progress = "prompt_progress" in event
    answer.progress = answer.progress or progress
    if at is not None and not progress and (event.get("content") or event.get("tokens")):
        answer.token(at, answer=True)
    if not event.get("stop"):
        return
    answer.usage(event.get("tokens_evaluated"), event.get("tokens_predicted"), None)
    timings = event.get("timings")
    if isinstance(timings, Mapping):
        read_timings(timings, answer)
    answer.finish("length" if event.get("stop_type") == "limit" else "stop", at, sequence)


def read_timings(timings: Mapping[str, Any], answer: Answer) -> None:
    """Counts and intervals of ``timings``; ``usage``, where there is one, goes before them."""
    output = count(timings.get("predicted_n"), None)
    cached = count(timings.get("cache_n"), None)
    prompt = count(timings.get("prompt_n"), None)
    if output:
        answer.engine_prefill_seconds = milliseconds(timings.get("prompt_ms"))
        answer.engine_decode_seconds = milliseconds(timings.get("predicted_ms"))
    if prompt is not None and cached is not None:
        prompt += cached
    answer.usage(
        prompt if answer.prompt_tokens is None else None,
        output,
        cached if answer.cached_tokens is None else None,
    )

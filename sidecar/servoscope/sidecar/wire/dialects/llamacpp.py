"""llama.cpp's own ``/completion`` and the ``timings`` that it adds to every dialect.

Facts from the server at build b11549: ``prompt_ms`` runs from the start of the prompt's processing
to the first sampled token, ``predicted_ms`` from there to the last; ``prompt_n`` leaves out the
tokens found in the cache, ``cache_n`` are those (builds before it came do not say how long the
prompt was, except in ``usage``). Events are not tokens (incomplete UTF-8 is held back), so counts
come from ``timings`` or ``tokens_predicted`` only; ``tokens_cached`` is what the slot holds at the
end, not what was found. With ``return_progress`` events with ``prompt_progress`` come before the
first token. Of several choices, or prompts, ``usage`` and ``timings`` are those of one: a stream
has them at the end of each, an answer that is no stream has them once.
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
        read_timings(timings, answer, sequence)
    # stopped_limit: builds before December 2024
    cut = event.get("stop_type") == "limit" or event.get("stopped_limit") is True
    answer.finish("length" if cut else "stop", at, sequence)


def read_timings(timings: Mapping[str, Any], answer: Answer, sequence: int = 0) -> None:
    """Counts and intervals of ``timings`` of one choice; of the prompt, ``usage`` goes before."""
    output = count(timings.get("predicted_n"), None)
    cached = count(timings.get("cache_n"), None)
    prompt = count(timings.get("prompt_n"), None)
    if output:
        answer.engine_prefill_seconds = milliseconds(timings.get("prompt_ms"))
        answer.engine_decode_seconds = milliseconds(timings.get("predicted_ms"))
        answer.timed_output(output, sequence)
    whole = None if prompt is None or cached is None else prompt + cached
    answer.usage(
        whole if answer.prompt_tokens is None else None,
        output,
        cached if answer.cached_tokens is None else None,
    )

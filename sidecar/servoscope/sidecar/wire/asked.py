"""What a request body asked for, as far as we keep it: no text, no other parameter."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from servoscope.sidecar.wire.answer import clean, count

__all__ = ["Asked", "read_request"]

_LIMIT_KEYS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")


@dataclass(frozen=True, slots=True)
class Asked:
    """``None`` where the body did not say, or was not read."""

    streaming: bool | None = None
    model_name: str | None = None
    max_output_tokens: int | None = None
    prompts: int = 1  # of one request: a list of texts, or of lists of token ids


def read_request(body: bytes) -> Asked | None:
    """What ``body`` asks for; None when it is no JSON object."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(request, dict):
        return None
    limits = (count(request.get(key), None) for key in _LIMIT_KEYS)
    return Asked(
        streaming=bool(request.get("stream", False)),
        model_name=clean(request.get("model"), 256),
        max_output_tokens=next((limit for limit in limits if limit is not None), None),
        prompts=_prompts(request.get("prompt")),
    )


def _prompts(prompt: object) -> int:
    """How many prompts ``prompt`` is. A list that begins with a token id is one of them."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1

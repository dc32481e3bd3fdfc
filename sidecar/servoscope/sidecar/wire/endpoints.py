"""Which requests are measured: POST to the inference paths of the engines. Others are no records.

The label is the table's path, never the one on the wire: a client cannot make up new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from servoscope.sidecar.wire.answer import Answer
from servoscope.sidecar.wire.dialects import anthropic, llamacpp, openai, responses

__all__ = ["ENDPOINTS", "Endpoint", "Reader", "endpoint_of"]

Reader = Callable[[Mapping[str, Any], Answer, float | None], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One inference path. ``generates`` is False where no generated tokens come back."""

    path: str
    read: Reader
    generates: bool = True


def _table() -> dict[bytes, Endpoint]:
    generating: dict[Reader, tuple[str, ...]] = {
        openai.read: (
            "/v1/chat/completions",
            "/v1/completions",
            "/chat/completions",
            "/invocations",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        responses.read: ("/v1/responses", "/responses"),
        anthropic.read: ("/v1/messages",),
        llamacpp.read: ("/completion", "/completions", "/infill"),
    }
    without_tokens = (
        "/v1/embeddings", "/embeddings", "/embedding",
        "/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking",
        "/v1/score", "/score", "/pooling", "/classify",
    )  # fmt: skip
    table = {p.encode(): Endpoint(p, read) for read, paths in generating.items() for p in paths}
    table |= {p.encode(): Endpoint(p, openai.read_answer, generates=False) for p in without_tokens}
    return table


ENDPOINTS: Mapping[bytes, Endpoint] = _table()


def endpoint_of(method: bytes, target: bytes) -> Endpoint | None:
    """The endpoint of a request line, or None for one that is not measured.

    A server mounted below a prefix (``--root-path``) is recognised by what follows ``/v1/``.
    """
    if method != b"POST":
        return None
    path = target.partition(b"?")[0].rstrip(b"/")
    if found := ENDPOINTS.get(path):
        return found
    prefix, mark, rest = path.rpartition(b"/v1/")
    return ENDPOINTS.get(b"/v1/" + rest) if prefix and mark else None

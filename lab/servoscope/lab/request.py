"""What a load client plans to send and what it saw: the vocabulary of the lab.

No text of an answer is kept anywhere here, only its digest and its lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from servoscope.exporters.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHAT", "COMPLETIONS", "Observed", "PlannedRequest"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request as it shall be sent. Raises ValueError naming the field that cannot be.

    ``prompt`` is text, or token ids (only for /v1/completions). ``model`` None leaves the choice to
    the server. An abort closes the connection: ``abort_after_seconds`` counts from the send (a
    small value hits the queue or prefill), ``abort_after_token_events`` hits decode.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    endpoint: str = COMPLETIONS
    max_tokens: int = 16
    streaming: bool = True
    request_type: str | None = None
    send_request_type: bool = True  # as the x-request-type header
    arrival_seconds: float = 0.0  # offset from the start of an open run
    abort_after_seconds: float | None = None
    abort_after_token_events: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise ValueError(f"endpoint: {self.endpoint!r} is neither {COMPLETIONS} nor {CHAT}")
        if not self.prompt:
            raise ValueError("prompt: empty")
        if self.endpoint == CHAT and not isinstance(self.prompt, str):
            raise ValueError(f"prompt: {CHAT} takes text, not token ids")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} is below 1")
        if not 0 <= self.arrival_seconds < float("inf"):
            raise ValueError(f"arrival_seconds: {self.arrival_seconds} is no offset")

    def body(self) -> dict[str, Any]:
        """The JSON body to send."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": self.streaming,
        }
        if self.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self.streaming:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.seed is not None:
            body["seed"] = self.seed
        if self.model is not None:
            body["model"] = self.model
        return body | dict(self.extra_body)

    def all_headers(self) -> dict[str, str]:
        """The HTTP headers to send, besides the client library's own."""
        headers = {"content-type": "application/json", "x-request-id": self.request_id}
        if self.request_type is not None and self.send_request_type:
            headers["x-request-type"] = self.request_type
        return headers | dict(self.headers)


@dataclass(slots=True, kw_only=True)
class Observed:
    """What the client saw of one planned request. Durations count from just before the send.

    ``ttft_seconds`` ends at the first event that carries a token, ``tpot_seconds`` is
    (last - first token) / (output_tokens - 1), ``e2e_seconds`` ends at the last byte (or at the
    abort, the error). ``sent`` False: a bound or a stop came first, nothing reached the server.
    """

    request_id: str
    request_type: str | None = None
    endpoint: str = ""
    streaming: bool = True
    sent: bool = False
    response_id: str | None = None
    status: int | None = None
    outcome: Outcome = Outcome.CANCELLED
    detail: str = ""
    started_unix_seconds: float | None = None
    late_seconds: float = 0.0  # how far behind its arrival offset an open run sent it
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None
    token_events: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    text_sha256: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The observation as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

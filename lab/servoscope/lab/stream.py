"""What a client sees of one answer: sans-I/O reading of OpenAI-style streams and bodies.

Bytes and the moment they arrived go in; the client's own truth comes out. This is the
independent witness that the product is judged by, so it shares no code with the sidecar.

Which event carries a token (contracts, "Interval definitions"):

* any choice with non-empty ``text``, ``content``, ``reasoning``, ``reasoning_content``,
  ``tool_calls`` or ``token_ids``;
* a choice with *empty* text, no role and no finish reason: the engine generated a token whose
  bytes are still an incomplete UTF-8 sequence (vLLM sends these);
* never the role chunk, a ``prompt_progress`` event (llama.cpp) or the usage chunk.

The last token is the later of the last such event and the event with the finish reason: vLLM's
last token travels in it, llama.cpp's arrives together with it. Events are not tokens (llama.cpp
holds back incomplete UTF-8: 26 events for 32 tokens), so counts come from ``usage`` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["MAX_LINE_BYTES", "AnswerReader", "StreamError"]

#: A longer line is no event of a healthy engine; a longer body is refused likewise (64x).
MAX_LINE_BYTES = 4 * 1024 * 1024

_PAYLOAD_KEYS = ("text", "content", "reasoning", "reasoning_content")


class StreamError(ValueError):
    """The answer cannot be read as the dialect it claims to be; the text says where."""


class AnswerReader:
    """Reads one answer, streamed or whole. Feed bytes with their arrival time, then read fields.

    Times are whatever monotonic seconds the caller uses. ``text_sha256`` covers answer text and
    reasoning in order of arrival; the text itself is not kept.
    """

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.token_events = 0
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.error: str | None = None
        self.done = False
        self._hash = hashlib.sha256()
        self._pending = b""

    @property
    def text_sha256(self) -> str:
        """Hex digest of the text so far."""
        return self._hash.hexdigest()

    @property
    def tpot_seconds(self) -> float | None:
        """(last token - first token) / (output tokens - 1); None below two output tokens."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        if self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)

    def feed(self, data: bytes, at: float) -> None:
        """Take bytes of an event stream that arrived at ``at`` seconds.

        Raises StreamError on a line that is no JSON, or a line longer than MAX_LINE_BYTES.
        """
        *lines, rest = (self._pending + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise StreamError(f"event line longer than {MAX_LINE_BYTES} bytes")
        self._pending = rest
        for line in lines:
            self._line(line.rstrip(b"\r"), at)

    def body(self, data: bytes) -> None:
        """Take a whole, not streamed, answer. Raises StreamError when it is no JSON object."""
        if len(data) > 64 * MAX_LINE_BYTES:
            raise StreamError("body too long")
        self._event(_json_object(data), None)

    def _line(self, line: bytes, at: float) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"error" and value:  # llama.cpp has sent errors under a field of its own
            self.error = value[:200].decode("utf-8", "replace")
        if field != b"data" or not value:
            return  # comments (keep-alive), event names, blank lines
        if value == b"[DONE]":
            self.done = True
            return
        self._event(_json_object(value), at)

    def _event(self, event: Mapping[str, Any], at: float | None) -> None:
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, Mapping) else error
            self.error = str(message)[:200]
            return
        if isinstance(event.get("id"), str):
            self.response_id = event["id"]
        self._usage(event)
        choices = event.get("choices")
        if not isinstance(choices, list):
            return
        carries, finished = False, False
        for choice in choices:
            if isinstance(choice, Mapping):
                carries |= self._choice(choice) and "prompt_progress" not in event
                finished |= choice.get("finish_reason") is not None
        if at is None:
            return
        if carries:
            self.token_events += 1
            if self.first_token_at is None:
                self.first_token_at = at
        if self.first_token_at is not None and (carries or finished):
            self.last_token_at = at

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        """Note text and finish reason of one choice; say whether it carries a token."""
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]
        part = choice
        for key in ("delta", "message"):
            if isinstance(choice.get(key), Mapping):
                part = choice[key]
        full, blank = False, False
        for key in _PAYLOAD_KEYS:
            text = part.get(key)
            if isinstance(text, str):
                self._hash.update(text.encode("utf-8", "surrogatepass"))
                full |= bool(text)
                blank |= not text
        if part.get("tool_calls") or part.get("token_ids") or choice.get("token_ids"):
            full = True
        held_back = blank and not part.get("role") and choice.get("finish_reason") is None
        return full or held_back

    def _usage(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, Mapping):
                self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        timings = event.get("timings")  # llama.cpp
        if isinstance(timings, Mapping) and self.cached_tokens is None:
            self.cached_tokens = _count(timings.get("cache_n"), None)


def _json_object(data: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise StreamError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StreamError(f"a JSON object was expected, not {type(value).__name__}")
    return value


def _count(value: Any, otherwise: int | None) -> int | None:
    """A token count as an engine sends it, or what was known before."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return otherwise

"""Requests and responses as bytes, and an Exchange to feed them to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from servoscope.exporters.records import RequestRecord, Source
from servoscope.sidecar.wire.exchange import Exchange
from servoscope.sidecar.wire.limits import Limits

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "wire"
CHAT = "/v1/chat/completions"


def exchange(**options: Any) -> Exchange:
    """An Exchange of a connection named c."""
    settings = {"source": Source.TAP, "server": "127.0.0.1:8000", "connection": "c"} | options
    return Exchange(**settings)


def request(
    body: dict[str, Any] | bytes = b'{"stream":true}',
    path: str = CHAT,
    headers: str = "",
    method: str = "POST",
) -> bytes:
    """One request with Content-Length."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def stream_head(headers: str = "", status: str = "200 OK") -> bytes:
    """Head of a chunked event stream."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream; charset=utf-8\r\n{headers}"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


def whole(body: Any, headers: str = "", status: str = "200 OK") -> bytes:
    """One JSON response with Content-Length."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat completion chunk."""
    choice = {"index": index, "delta": fields, "finish_reason": finish}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    """The usage chunk at the end of a stream."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": counts}


END = b"0\r\n\r\n"
DONE = chunk(event("[DONE]"))


def feed(target: Exchange, steps: Iterable[tuple[float, str, bytes]]) -> list[RequestRecord]:
    """``steps``: (time, "c" or "s", bytes)."""
    records: list[RequestRecord] = []
    for at, side, data in steps:
        records += (target.client_bytes if side == "c" else target.server_bytes)(data, at)
    return records


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``data`` cut at the given positions (taken modulo its length)."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if b > a]


SMALL = Limits(
    request_body_bytes=1000,
    response_body_bytes=1000,
    event_bytes=500,
    decoded_bytes=5000,
    silent_bytes=2000,
    target_bytes=200,
    open_calls=4,
    gaps=8,
    resyncs=3,
)

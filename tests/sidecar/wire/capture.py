"""Captures fixtures: sends a fixed set of synthetic requests, keeps both directions' raw bytes.

``python tests/sidecar/wire/capture.py HOST PORT DIRECTORY [MODEL]`` writes NAME.request and
NAME.response. Only for engines of one's own: what is written is what was answered.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

PROMPT = "the quick brown fox in the inner theatre "


def requests(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name, path and body of every request that is captured."""
    chat = {"model": model, "messages": [{"role": "user", "content": PROMPT * 3}], "max_tokens": 8}
    text = {"model": model, "prompt": PROMPT * 3, "max_tokens": 8, "temperature": 0}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    ask = {"model": model, "input": PROMPT * 3, "max_output_tokens": 8}
    return {
        "chat_stream": ("/v1/chat/completions", chat | usage),
        "chat_stream_no_usage": ("/v1/chat/completions", chat | {"stream": True}),
        "chat_stream_two": ("/v1/chat/completions", chat | usage | {"n": 2}),
        "chat_whole": ("/v1/chat/completions", chat),
        "completions_stream": ("/v1/completions", text | usage | {"ignore_eos": True}),
        "completions_whole": ("/v1/completions", text),
        "responses_stream": ("/v1/responses", ask | {"stream": True}),
        "responses_whole": ("/v1/responses", ask),
        "messages_stream": ("/v1/messages", chat | {"stream": True}),
        "messages_whole": ("/v1/messages", chat),
        "completion_stream": (
            "/completion",
            {"prompt": PROMPT, "n_predict": 8, "stream": True, "return_progress": True},
        ),
        "completion_whole": ("/completion", {"prompt": PROMPT, "n_predict": 8}),
        "bad_request": ("/v1/completions", {"model": model, "prompt": 5, "max_tokens": "many"}),
    }


def exchange(host: str, port: int, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Send one request on a connection of its own; request and response, as on the wire."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: fixture-{path.rpartition('/')[2]}\r\nX-Request-Type: chat\r\n"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    request = head.encode() + payload
    with socket.create_connection((host, port), timeout=60) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return request, b"".join(parts)


def main(host: str, port: str, directory: str, model: str = "tiny") -> None:
    """Capture all of ``requests``."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    for name, (path, body) in requests(model).items():
        request, response = exchange(host, int(port), path, body)
        status = response[9:12].decode()
        if status == "404":
            continue  # an endpoint that this engine does not have
        (out / f"{name}.request").write_bytes(request)
        (out / f"{name}.response").write_bytes(response)
        print(status, name, len(response))


if __name__ == "__main__":
    main(*sys.argv[1:])

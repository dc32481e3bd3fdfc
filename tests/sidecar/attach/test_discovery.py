"""Discovery asks only what looks like an LLM server, and each port once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from servoscope.sidecar.attach import discovery
from servoscope.sidecar.attach.discovery import (
    discover,
    hidden_worth_asking,
    looks_like_a_server,
    worth_asking,
)
from servoscope.sidecar.attach.processes import Listener

VLLM = ["python3", "-m", "vllm.entrypoints.openai.api_server"]


@pytest.mark.parametrize(
    ("argv", "likely"),
    [
        (VLLM, True),
        (["/usr/bin/vllm", "serve", "m"], True),
        (["llama-server", "-m", "x.gguf"], True),
        (["python", "-m", "sglang.launch_server"], True),
        (["text-generation-launcher"], True),
        (["postgres", "-D", "/data"], False),
        (["nginx"], False),
        (["python", "-m", "servoscope collector"], False),
        (["python", "/usr/bin/servoscope", "sidecar"], False),
        (["python", "-m", "jupyter", "lab"], False),
        ([], False),
    ],
)
def test_what_looks_like_a_server(argv: list[str], likely: bool) -> None:
    assert looks_like_a_server(argv) is likely


def test_each_port_is_asked_once_and_never_our_own() -> None:
    found = [
        (Listener("0.0.0.0", 8000, 7), VLLM),
        (Listener("::", 8000, 7), VLLM),
        (Listener("::1", 8001, 7), VLLM),
        (Listener("127.0.0.1", 5432, 8), ["postgres"]),
        (Listener("127.0.0.1", 9000, os.getpid()), VLLM),
    ]
    assert worth_asking(found) == [("127.0.0.1", 8000), ("::1", 8001)]


def test_it_is_bounded() -> None:
    found = [(Listener("127.0.0.1", port, 7), VLLM) for port in range(1000, 9000)]
    assert len(worth_asking(found)) == 64


def test_ports_whose_owner_cannot_be_seen_are_asked_on_loopback_only() -> None:
    hosts = ("127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1", "192.0.2.7", "garbage")
    found = [Listener(host, 8000 + at, None) for at, host in enumerate(hosts)]
    found += [Listener("0.0.0.0", 8001, None), Listener("::1", 8001, None)]
    found += [Listener("127.0.0.1", 8100, 7)]  # seen: judged by its command line
    found += [Listener("127.0.0.1", port, None) for port in (22, 80, 5432, 9780, 9791, 9880, 8200)]
    asked = hidden_worth_asking(found, known=(8200,))
    assert asked == [
        ("127.0.0.1", 8000), ("127.0.0.1", 8001), ("127.0.0.1", 8002), ("::1", 8003),
        ("127.0.0.1", 8004), ("127.0.0.1", 80),
    ]  # fmt: skip
    many = [Listener("127.0.0.1", port, None) for port in range(20_000, 21_000)]
    assert len(hidden_worth_asking(many)) == 64


async def test_an_engine_of_another_user_is_found(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = [Listener("127.0.0.1", engine.port, None)]
    monkeypatch.setattr(discovery, "listeners", lambda: sockets)
    found = await discover()
    assert [(t.port, t.engine) for t in found] == [(engine.port, "vllm")]
    assert engine.hits == {"/v1/models": 1, "/version": 1}


async def test_engines_of_two_kinds_are_found_and_others_are_left_alone(
    engine: Any, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type(engine)()
    other.paths = {
        "/v1/models": {"data": [{"id": "s", "owned_by": "sglang"}]}, "/version": None,
        "/server_info": {"version": "0.5.23"},
    }  # fmt: skip
    await other.start()
    web = type(engine)()
    web.paths = {"/v1/models": None, "/version": None}
    await web.start()
    sockets = [("127.0.0.1", p) for p in (engine.port, other.port, web.port, unused_tcp_port)]
    monkeypatch.setattr(discovery, "_likely_sockets", lambda: sockets)
    found = {t.port: t for t in await discover()}
    await other.stop()
    await web.stop()
    assert set(found) == {engine.port, other.port}
    assert (found[engine.port].engine, found[engine.port].supported) == ("vllm", True)
    assert (found[other.port].engine, found[other.port].supported) == ("sglang", True)
    assert found[other.port].version == "0.5.23"
    assert engine.hits == {"/v1/models": 1, "/version": 1}
    assert web.hits == {"/v1/models": 1}


async def test_the_real_process_table_can_be_read() -> None:
    assert isinstance(discovery._likely_sockets(), list)

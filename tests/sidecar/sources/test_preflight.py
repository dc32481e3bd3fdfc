"""What was asked for and cannot be had ends the sidecar before it serves."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from servoscope.sidecar.attach.target import attach
from servoscope.sidecar.config import SidecarConfig
from servoscope.sidecar.sources import preflight

MISSING = "the right to capture (CAP_NET_RAW) is missing; grant it: `sudo setcap …`"


@pytest.mark.parametrize(("tap", "missing"), [("auto", MISSING), ("off", MISSING), ("on", None)])
async def test_nothing_to_insist_on(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tap: str, missing: str | None
) -> None:
    monkeypatch.setattr(preflight, "tap_missing", lambda *_asked: missing)
    preflight.insist(SidecarConfig(tap=tap, relay="127.0.0.1:0"), await attach(engine.url))


async def test_a_tap_that_was_asked_for(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "tap_missing", lambda *_asked: MISSING)
    with pytest.raises(PermissionError) as caught:
        preflight.insist(SidecarConfig(tap="on"), await attach(engine.url))
    assert MISSING in str(caught.value)


async def test_a_taken_relay_address(engine: Any) -> None:
    target = await attach(engine.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"relay: cannot listen on {address}: Address already"):
            preflight.insist(SidecarConfig(relay=address), target)
    preflight.insist(SidecarConfig(relay=address), target)


async def test_a_taken_otlp_address(engine: Any) -> None:
    vllm = await attach(engine.url)
    sglang = replace(vllm, engine="sglang")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"otlp: cannot listen on {address}: Address already"):
            preflight.insist(SidecarConfig(otlp=address), sglang)
        preflight.insist(SidecarConfig(otlp=address), vllm)  # who never sends spans
    preflight.insist(SidecarConfig(otlp=address), sglang)

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest

from servoscope.sidecar.tap.preflight import has_capability, tap_missing


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("Name:\tx\nCapEff:\t000001ffffffffff\n", True),
        ("CapEff:\t0000000000002000\n", True),
        ("CapEff:\t0000000000001000\n", False),
        ("CapPrm:\t000001ffffffffff\n", None),
        ("CapEff:\tzzz\n", None),
        ("", None),
    ],
)
def test_capability_of_a_status(text: str, held: bool | None) -> None:
    assert has_capability(text) is held


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


def test_missing_right_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def only_packet_sockets(family: Any = socket.AF_INET, *rest: Any) -> Any:
        return refuse() if family == socket.AF_PACKET else real(family, *rest)

    monkeypatch.setattr("servoscope.sidecar.tap.preflight.socket.socket", only_packet_sockets)
    missing = tap_missing("127.0.0.1", 8000)
    assert missing is not None
    assert "CAP_NET_RAW" in missing
    assert f"sudo setcap cap_net_raw+ep {os.path.realpath(sys.executable)}" in missing
    assert "as root" in missing
    assert "--relay" in missing


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("unix:/run/engine.sock", 8000, "unix socket"),
        ("/run/engine.sock", 8000, "unix socket"),
        ("203.0.113.7", 8000, "not an address of this host"),
        ("127.0.0.1", 0, "no TCP port"),
        ("127.0.0.1", 70_000, "no TCP port"),
        ("no such host", 8000, "cannot resolve"),
    ],
)
def test_what_cannot_be_tapped_says_why(host: str, port: int, words: str) -> None:
    missing = tap_missing(host, port)
    assert missing is not None
    assert words in missing


def test_other_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servoscope.sidecar.tap.preflight.sys.platform", "darwin")
    missing = tap_missing("127.0.0.1", 8000)
    assert missing is not None
    assert "darwin" in missing
    assert "relay" in missing


def test_other_network_namespace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"/proc/self/ns/net": "net:[1]", "/proc/77/ns/net": "net:[2]"}
    monkeypatch.setattr(
        "servoscope.sidecar.tap.preflight.Path.readlink", lambda self: link[str(self)]
    )
    missing = tap_missing("127.0.0.1", 8000, pid=77)
    assert missing is not None
    assert "sudo nsenter --net --target 77" in missing
    assert "http://127.0.0.1:8000" in missing


def test_process_that_is_gone_is_no_obstacle() -> None:
    with_pid = tap_missing("127.0.0.1", 8000, pid=2**22 + 1)
    assert with_pid == tap_missing("127.0.0.1", 8000)


@pytest.mark.root
def test_root_may_tap_loopback() -> None:
    assert tap_missing("127.0.0.1", 8000, pid=os.getpid()) is None

"""The sidecar's port: the next free one, and words that say what another port would not cure."""

from __future__ import annotations

import socket

import pytest

from servoscope.sidecar.api.server import bind


def test_the_next_port_is_taken_when_one_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with bind("127.0.0.1", port, 100) as ours:
            assert port < ours.getsockname()[1] < port + 100


def test_an_address_that_is_not_ours_is_no_matter_of_ports() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1, port 9790: ") as caught:
        bind("192.0.2.1", 9790, 100)
    assert "no free port" not in str(caught.value)

"""For the tests of what runs inside engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from servoscope.exporters.plugin.line_server import LineServer


@pytest.fixture
def line_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LineServer]]:
    """Whatever starts a socket in this test: its server, in order. All end with the test."""
    servers: list[LineServer] = []
    start = LineServer.start

    def started(server: LineServer) -> None:
        servers.append(server)
        start(server)

    monkeypatch.setattr(LineServer, "start", started)
    yield servers
    for server in servers:
        server.stop()

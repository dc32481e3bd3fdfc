"""A web page whose name resolves to us gets nothing; everybody else gets what they got before."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

Serve = Callable[..., Any]
PAGES = (
    "/healthz", "/readyz", "/metrics", "/api/v1/overview", "/api/v1/lengths", "/api/v1/policy",
    "/api/v1/records/recent", "/runbooks/ServoscopeEngineGone.md", "/openapi.json", "/nothing",
)  # fmt: skip


def ask(client: Any, path: str, *hosts: str, method: str = "GET") -> tuple[int, bytes]:
    parts = urlsplit(client.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_refused_in_another_hosts_name(serve: Serve, path: str) -> None:
    client = serve()
    for host in ("evil.example", f"evil.example:{urlsplit(client.url).port}", "127.0.0.1.nip.io"):
        status, body = ask(client, path, host)
        assert status == 421
        assert b"collector.allowed_hosts" in body
        assert host.encode() in body
    assert b"servoscope_collector_refused_hosts_total 3.0" in ask(client, "/metrics", "[::1]")[1]


def test_records_are_refused_too_and_nothing_is_stored(serve: Serve) -> None:
    client = serve()
    assert ask(client, "/api/v1/records", "evil.example", method="POST")[0] == 421
    assert client.get("/api/v1/records/recent").json == {"records": []}


@pytest.mark.parametrize("hosts", [(), ("evil.example", "127.0.0.1"), ("127.0.0.1", "localhost")])
def test_no_host_or_two_are_refused(serve: Serve, hosts: tuple[str, ...]) -> None:
    assert ask(serve(), "/api/v1/policy", *hosts)[0] in (400, 421)  # 400: the HTTP parser's own


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:1", "localhost:9780", "[::1]", "LOCALHOST"]
)
def test_this_host_is_answered(serve: Serve, host: str) -> None:
    assert ask(serve(), "/api/v1/policy", host)[0] == 200


def test_names_can_be_allowed(serve: Serve) -> None:
    client = serve(allowed_hosts=("Collector.Example.org",))
    assert ask(client, "/healthz", "collector.example.org:9780")[0] == 200
    assert ask(client, "/healthz", "example.org")[0] == 421


def test_beyond_loopback_addresses_and_the_own_name_are_answered(
    serve: Serve, tmp_path: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    client = serve(listen="0.0.0.0", token_file=str(token))
    assert ask(client, "/healthz", "192.0.2.7:9780")[0] == 200
    assert ask(client, "/healthz", socket.gethostname())[0] == 200
    assert ask(client, "/healthz", "evil.example")[0] == 421
    assert ask(client, "/api/v1/policy", "192.0.2.7:9780")[0] == 401

"""One server has one URL, however its address is written."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from servoscope.cli.servers import one_url, server_of, unique_servers


@contextlib.contextmanager
def listening(*addresses: str) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        port = 0
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(addresses) - 1)
            one.bind((address, port))
            one.listen()
            port = one.getsockname()[1]
        yield port


FORMS = (
    "http://localhost:{}", "http://LOCALHOST:{}/v1", "localhost:{}", "http://127.0.0.1:{}",
    "127.0.0.1:{}", "http://[::1]:{}", "http://[0:0:0:0:0:0:0:1]:{}",
)  # fmt: skip


@pytest.mark.parametrize("addresses", [("127.0.0.1", "::1"), ("0.0.0.0", "::"), ("::",)])
def test_all_forms_of_a_server_are_one(addresses: tuple[str, ...]) -> None:
    with listening(*addresses) as port:
        forms = [form.format(port) for form in FORMS]
        assert {server_of(one_url(form)) for form in forms} == {f"127.0.0.1:{port}"}
        assert len(unique_servers(forms)) == 1
        if "0.0.0.0" in addresses:
            assert server_of(one_url(f"http://0.0.0.0:{port}")) == f"127.0.0.1:{port}"


def test_a_server_on_ipv6_alone_keeps_its_address() -> None:
    with listening("::1") as port:
        assert one_url(f"http://[::1]:{port}") == f"http://[::1]:{port}"
        assert one_url(f"http://127.0.0.1:{port}") == f"http://127.0.0.1:{port}"  # another one's


def test_a_path_stays() -> None:
    with listening("127.0.0.1") as port:
        assert one_url(f"http://localhost:{port}/v1") == f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize(
    "url",
    ["https://localhost:8443", "http://host.invalid:80", "http://[::1", "ftp://x", "", "http://:80",
     "http://127.0.0.1:99999"],
)  # fmt: skip
def test_what_is_left_as_it_is(url: str) -> None:
    assert one_url(url) == url


def test_what_is_no_url_is_said() -> None:
    with pytest.raises(ValueError, match="Port out of range"):
        unique_servers(["http://127.0.0.1:99999"])
    for url in ("http://", "ftp://127.0.0.1:8000", "8000", "http://127.0.0.1:abc", ""):
        with pytest.raises(ValueError, match="is not a") as caught:
            server_of(url)
        assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:8000", "http://me:secret@host:99999"])
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as caught:
        server_of(url)
    assert "secret" not in str(caught.value)

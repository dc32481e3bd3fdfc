"""Which Host is answered: known names and every address, whatever else is sent."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.hosts import (
    host_allowed,
    host_refused,
    host_served,
    known_hosts,
    wrong_host,
)

LABEL = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_-]{0,20}", fullmatch=True)
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
PORTS = st.sampled_from(["", ":"]) | st.integers(0, 65_535).map(lambda n: f":{n}")


@given(NAMES, PORTS, st.sampled_from(["", "."]))
def test_a_name_is_answered_when_it_is_known_whatever_its_case_and_port(
    name: str, port: str, dot: str
) -> None:
    header = f"{name}{dot}{port}"
    assert host_served(header) == name.lower()
    assert host_allowed(header, [name.swapcase()])
    assert host_allowed(header, ["*"])
    assert host_allowed(header, []) == (name.lower() == "localhost")
    assert not host_allowed(header, [f"x-{name}", f"{name}.x", name + "x"]) or (
        name.lower() == "localhost"
    )


@given(st.ip_addresses(v=4), PORTS)
def test_every_ipv4_address_is_answered(address: ipaddress.IPv4Address, port: str) -> None:
    assert host_allowed(f"{address}{port}", ())


@given(st.ip_addresses(v=6), PORTS)
def test_every_ipv6_address_is_answered_in_brackets_only(
    address: ipaddress.IPv6Address, port: str
) -> None:
    assert host_allowed(f"[{address}]{port}", ())
    assert host_allowed(f"[{address.exploded.upper()}]{port}", ())
    assert not host_allowed(f"[{address}", ())
    assert not host_allowed(str(address), ()) or str(address).count(":") < 2


@given(st.text(max_size=60))
def test_any_text_is_answered_only_as_an_address_or_a_known_name(header: str) -> None:
    host = host_served(header)
    if host is None:
        assert not host_allowed(header, ["*"])
    else:
        assert host == host.lower()
        assert len(host) <= 253
        assert not set(host) & set(" @/\\?#\"'<>\r\n")
    if host_allowed(header, ()):
        assert host is not None
        assert host == "localhost" or ipaddress.ip_address(host)


@pytest.mark.parametrize(
    "header",
    [
        None, "", ":", ":9780", " ", "evil.example", "evil.example:9780", "127.0.0.1.evil.example",
        "localhost.evil.example", "evil.localhost", "evil@127.0.0.1", "127.0.0.1@evil.example",
        "127.0.0.1, evil.example", "127.0.0.1 evil.example", "localhost/", "localhost#", "[::1",
        "::1", "[::1]x", "[::1%x]", "[::1%/]",
        "[::1]:x", "[127.0.0.1]", "[evil.example]", "127.0.0.1:123456",
        "127.0.0.1:80:80", "127.0.0.1:-1", "localhost:\u0661", "loc\u0430lhost", "a..b", ".",
        "localhost..", "x" * 301, "127.0.0.1:80\r\nhost: x",
    ],
)  # fmt: skip
def test_what_is_not_answered(header: str | None) -> None:
    assert not host_allowed(header, known_hosts("127.0.0.1", ["metrics.example.org"], "box"))


@pytest.mark.parametrize(
    "header",
    [
        "localhost", "LOCALHOST:9780", "localhost.", "127.0.0.1:9780", "[::1]:9780", "[::1]",
        "192.0.2.7:9780", "0.0.0.0:9780", "metrics.example.org", "Metrics.Example.ORG:443",
    ],
)  # fmt: skip
def test_what_is_answered_on_loopback(header: str) -> None:
    assert host_allowed(header, known_hosts("127.0.0.1", ["metrics.example.org"], "box"))


def test_own_names_are_known_where_others_can_reach_us() -> None:
    for listen in ("0.0.0.0", "::", "192.0.2.7", "gateway", "[2001:db8::1]"):
        known = known_hosts(listen, [], "Box.Example.org")
        assert host_allowed("box.example.org:9780", known)
        assert host_allowed("box", known)
        assert not host_allowed("box.evil.example", known)
        assert not host_allowed("evil.example", known)
    assert host_allowed("gateway:1", known_hosts("gateway", [], "box"))
    for listen in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1"):
        assert known_hosts(listen, [], "box") <= {"localhost"}


def test_a_host_without_a_usable_name_adds_none() -> None:
    assert known_hosts("0.0.0.0", [], "") == frozenset()
    assert known_hosts("0.0.0.0", ["*"], "not a name") == {"*"}


@pytest.mark.parametrize(
    "text",
    ["http://a.example", "a.example:80", "", "a b", "a/b", "*.example.org", "[x]", "x" * 999],
)
def test_a_list_entry_that_would_never_match_is_told(text: str) -> None:
    why = wrong_host(text)
    assert why is not None
    assert len(why) < 200


@pytest.mark.parametrize(
    "text", ["*", "a.example", "A.Example.", "box", "192.0.2.7", "::1", "[::1]"]
)
def test_a_good_list_entry(text: str) -> None:
    assert wrong_host(text) is None


def test_the_refusal_names_the_setting_and_is_bounded() -> None:
    assert "collector.allowed_hosts" in host_refused("evil.example", "collector.allowed_hosts")
    assert "collector.allowed_hosts" in host_refused(None, "collector.allowed_hosts")
    assert len(host_refused("x" * 100_000, "s")) < 200

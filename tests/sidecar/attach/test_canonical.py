"""One server, one name, however it is addressed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.attach.canonical import Place, canonical, locate, server_label
from servoscope.sidecar.attach.processes import Listener
from servoscope.sidecar.attach.target import attach

V4, ANY4, V6, ANY6, LAN = "127.0.0.1", "0.0.0.0", "::1", "::", "10.0.0.5"


def never() -> bool:
    raise AssertionError("127.0.0.1 was knocked at without need")


def place(address: str, *found: tuple[str, int | None], dual: Any = never) -> Place | None:
    return canonical([address], [Listener(host, 8000, pid) for host, pid in found], dual)


@pytest.mark.parametrize("address", [V4, ANY4, V6, ANY6, LAN, "127.0.0.2", "::ffff:127.0.0.1"])
def test_every_way_to_a_dual_stack_listener_is_one_server(address: str) -> None:
    for pid in (7, None):  # also where its process is not ours to see
        owners = frozenset(() if pid is None else (pid,))
        assert place(address, (ANY6, pid), dual=lambda: True) == Place(V4, owners)


@pytest.mark.parametrize("address", [V4, V6, ANY4, ANY6])
def test_two_sockets_of_one_process_are_one_server(address: str) -> None:
    assert place(address, (V4, 7), (V6, 7)) == Place(V4, frozenset({7}))
    assert place(address, (ANY4, 7), (ANY6, 7)) == Place(V4, frozenset({7}))
    assert place(address, ("::ffff:127.0.0.1", 7), (V6, 7)) == Place(V4, frozenset({7}))


def test_two_processes_on_one_port_are_two_servers() -> None:
    assert place(V4, (V4, 7), (V6, 8)) == Place(V4, frozenset({7}))
    assert place(V6, (V4, 7), (V6, 8)) == Place(V6, frozenset({8}))
    assert place(LAN, (V4, 7), (LAN, 8)) == Place(LAN, frozenset({8}))
    assert place(V6, (ANY4, 7), (ANY6, 8)) == Place(V6, frozenset({8}))


def test_sockets_whose_owners_are_hidden_are_not_taken_for_one() -> None:
    assert place(V6, (V4, None), (V6, None)) == Place(V6)


def test_several_processes_that_share_a_socket_are_one_server() -> None:
    shared = [(ANY4, 7), (ANY4, 8)]
    assert place(LAN, *shared) == place(V4, *shared) == Place(V4, frozenset({7, 8}))


def test_a_listener_for_ipv6_only_keeps_its_name() -> None:
    assert place(V6, (V6, 7)) == Place(V6, frozenset({7}))
    assert place(ANY6, (V6, 7)) == Place(V6, frozenset({7}))
    assert place(V6, (ANY6, 7), dual=lambda: False) == Place(V6, frozenset({7}))


def test_an_address_that_loopback_does_not_reach_keeps_its_name() -> None:
    assert place(LAN, (LAN, 7)) == Place(LAN, frozenset({7}))
    assert place(LAN, (ANY4, 7)) == Place(V4, frozenset({7}))
    assert place("fe80::1", (ANY6, 7), dual=lambda: True) == Place(V4, frozenset({7}))


def test_where_nothing_listens_there_is_no_place() -> None:
    assert place(V4) is None
    assert place(V6, (V4, 7)) is None
    assert place(V4, (ANY6, 7), dual=lambda: False) is None


LISTENING = st.lists(
    st.tuples(st.sampled_from([V4, ANY4, V6, ANY6, LAN]), st.sampled_from([None, 7, 8])), max_size=6
)


@given(LISTENING, st.sampled_from([V4, V6, LAN]), st.booleans())
def test_the_name_names_itself(
    found: list[tuple[str, int | None]], address: str, dual: bool
) -> None:
    first = place(address, *found, dual=lambda: dual)
    if first is not None:
        again = place(first.host, *found, dual=lambda: dual)
        assert again is not None
        assert again.host == first.host


def listening(family: int, host: str, port: int = 0, *, v6only: bool = False) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only))
    made.bind((host, port))
    made.listen()
    return made


def test_real_sockets() -> None:
    us = frozenset({os.getpid()})
    with listening(socket.AF_INET6, "::") as both:
        port = both.getsockname()[1]
        for host in ("localhost", V4, V6, "127.0.0.2", ANY4):
            assert locate(host, port) == Place(V4, us)
    with listening(socket.AF_INET6, "::", v6only=True) as six:
        assert locate(V6, six.getsockname()[1]) == Place(V6, us)
    with listening(socket.AF_INET, ANY4) as four:
        assert locate(socket.gethostname(), four.getsockname()[1]) == Place(V4, us)


def test_another_host_keeps_its_name() -> None:
    assert locate("192.0.2.7", 8000) == Place("192.0.2.7")
    assert locate("no-such-host.invalid", 8000) == Place("no-such-host.invalid")
    assert server_label("no-such-host.invalid", 80) == "no-such-host.invalid:80"
    assert server_label("fe80::1", 80) == "[fe80::1]:80"


async def test_two_ways_to_an_engine_are_one_label(engine: Any, places: tuple[Path, Path]) -> None:
    by_address, by_name, by_another = [
        await attach(f"http://{host}:{engine.port}") for host in (V4, "localhost", V4)
    ]
    assert by_address.server == by_name.server == by_another.server == f"{V4}:{engine.port}"
    await engine.stop()
    await engine.start(host="::")
    for host in (V4, "[::1]", "localhost", "127.0.0.2"):
        target = await attach(f"http://{host}:{engine.port}")
        assert target.server == f"{V4}:{engine.port}"
        assert os.getpid() in target.pids

from __future__ import annotations

import socket

from servoscope.sidecar.tap.listeners import (
    LocalAddresses,
    listening_addresses,
    parse_listeners,
    read_listeners,
)
from servoscope.sidecar.tap.source import where_to_listen

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   2: 0200007F:1F40 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1 1
   3: zzzz:1F40 00000000:0000 0A
   4: 0100007F:xxxx 00000000:0000 0A
   garbage
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A
   1: 0000000000000000FFFF00000100007F:1F40 00000000000000000000000000000000:0000 0A
"""
V4, V6 = bytes([127, 0, 0, 1]), bytes(15) + b"\x01"


def test_listeners_of_a_port() -> None:
    assert parse_listeners(TCP, 8000, "little") == {V4}
    assert parse_listeners(TCP, 8001, "little") == {bytes(4)}
    assert parse_listeners(TCP, 9, "little") == set()
    big = TCP.replace("0100007F:1F40", "7F000001:1F40")
    assert parse_listeners(big, 8000, "big") == {V4}
    assert parse_listeners("", 8000) == set()


def test_addresses_as_packets_show_them() -> None:
    found = parse_listeners(TCP6, 8000, "little")
    assert listening_addresses(found) == frozenset({V6, V4})
    assert listening_addresses({V4, bytes(4)}) is None
    assert listening_addresses({bytes(16)}) is None
    assert listening_addresses([]) == frozenset()


def test_where_to_listen() -> None:
    assert where_to_listen("127.0.0.1", None, frozenset({V4})) == ("lo", frozenset({V4}))
    assert where_to_listen("127.0.0.1", None, frozenset()) == ("lo", frozenset({V4}))
    real = frozenset({bytes([10, 0, 0, 5])})
    assert where_to_listen("10.0.0.5", None, real) == (None, real)
    assert where_to_listen("10.0.0.5", "eth0", real) == ("eth0", real)
    interface, addresses = where_to_listen("127.0.0.1", None, None)
    assert interface is None
    assert V4 in addresses


def test_own_addresses_are_told_from_others() -> None:
    local = LocalAddresses()
    assert V4 in local
    assert bytes([127, 9, 9, 9]) in local
    assert bytes([198, 51, 100, 1]) not in local
    assert bytes([198, 51, 100, 1]) not in local
    assert bytes(4) not in local
    assert "127.0.0.1" not in local
    for n in range(6000):  # remembered answers are bounded
        assert bytes([198, 51, n // 256, n % 256]) not in local
    assert len(local._known) <= 4096


def test_real_listener_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert read_listeners(server.getsockname()[1]) == {V4}

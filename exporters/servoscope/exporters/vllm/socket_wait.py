"""How long a request's last bytes lay in the kernel before the HTTP server took them.

An event loop that is busy leaves a request in its socket, and no stamp of the server's shows it.
Linux keeps for each TCP connection how long ago data last came in: ``tcpi_last_data_recv`` of
TCP_INFO (linux/tcp.h), in milliseconds and in steps of the kernel's tick, 1 to 10 ms. Once a body
was read to its end that data is its last: the request's receipt, on the wire's side of the wait.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

__all__ = ["MAX_WAIT_SECONDS", "SURE_SECONDS", "seconds_in_socket", "wait_of"]

_LAST_DATA_RECV = 52  # offset in struct tcp_info: eight bytes, then eleven words
_LENGTH = _LAST_DATA_RECV + 4
_WORD = struct.Struct("=I")
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux
#: A wait below this cannot be told from none: one tick where there are 250 a second.
SURE_SECONDS = 0.005
MAX_WAIT_SECONDS = 600.0


def wait_of(info: bytes) -> float:
    """Seconds since data last came, of a ``struct tcp_info``; 0.0 for what cannot be believed.

    0.0 also where the kernel does not say (a short structure) and for less than ``SURE_SECONDS``.
    """
    if len(info) < _LENGTH:
        return 0.0
    wait = float(_WORD.unpack_from(info, _LAST_DATA_RECV)[0]) / 1e3
    return wait if SURE_SECONDS <= wait <= MAX_WAIT_SECONDS else 0.0


def seconds_in_socket(receive: Any) -> float:
    """The wait of the request that this ASGI ``receive`` belongs to; 0.0 where it is not known.

    uvicorn's ``receive`` is a method of the object that holds the connection's ``transport``. Other
    servers, unix sockets and kernels without TCP_INFO do not tell: never an error.
    """
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is None or _TCP_INFO is None:
        return 0.0
    try:
        connection = transport.get_extra_info("socket")
        return wait_of(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH))
    except (OSError, AttributeError, TypeError, ValueError):
        return 0.0

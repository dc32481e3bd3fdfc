"""Whether the tap can work here, and if not, exactly what is missing and what grants it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

__all__ = ["has_capability", "tap_missing"]

_CAP_NET_RAW = 13


def tap_missing(host: str, port: int, pid: int | None = None) -> str | None:
    """None when requests to ``host:port`` can be captured, else what is missing, in words.

    ``pid`` is a process of the engine: the tap sees only its own network namespace.
    """
    if not 0 < port < 65536:
        return f"port {port} is no TCP port"
    if host.startswith(("/", "unix:")):
        return (
            "the engine listens on a unix socket and the tap sees TCP only; use the engine plug-in"
        )
    if not sys.platform.startswith("linux"):
        return f"the tap needs Linux, this is {sys.platform}; use the relay (--relay HOST:PORT)"
    if (why := _not_local(host)) is not None:
        return why
    if pid is not None and (why := _other_namespace(pid, f"http://{host}:{port}")) is not None:
        return why
    return _no_right()


def has_capability(status: str, bit: int = _CAP_NET_RAW) -> bool | None:
    """Whether ``/proc/PID/status`` says that a capability is in force; None when it does not say.

    A capability inside a container's user namespace counts only for namespaces that it owns.
    """
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            try:
                return bool(int(value.strip(), 16) >> bit & 1)
            except ValueError:
                return None
    return None


def _not_local(host: str) -> str | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"cannot resolve {host}: {error.strerror or error}"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return None
        except OSError:
            continue
    return (
        f"{host} is not an address of this host, and the tap sees only this host's packets; "
        "run the sidecar beside the engine, or use the relay (--relay HOST:PORT)"
    )


def _other_namespace(pid: int, url: str) -> str | None:
    try:
        ours = Path("/proc/self/ns/net").readlink()
        theirs = Path(f"/proc/{pid}/ns/net").readlink()
    except OSError:
        return None  # another user's process: cannot be told, the capture will show
    if ours == theirs:
        return None
    command = Path(sys.executable).with_name("servoscope")
    return (
        f"process {pid} has its own network namespace (a container?); run the sidecar in it: "
        f"`sudo nsenter --net --target {pid} {command} sidecar {url}`"
    )


def _no_right() -> str | None:
    """Try it: the kernel's answer is the only certain one."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except PermissionError:
        return f"the right to capture (CAP_NET_RAW) is missing{_held()}; grant it: {_grant()}"
    except OSError as error:
        return f"this kernel has no packet sockets: {error.strerror or error}; use the relay"
    return None


def _held() -> str:
    try:
        held = has_capability(Path("/proc/self/status").read_text())
    except OSError:
        return ""
    return " in this network namespace although the process holds it" if held else ""


def _grant() -> str:
    python = os.path.realpath(sys.executable)
    return (
        f"`sudo setcap cap_net_raw+ep {python}` and start again "
        "(every program of this Python may capture then), or run the sidecar as root; "
        "without either, let clients go through --relay HOST:PORT"
    )

"""The tap: per-request facts by passive capture of the engine's port. Adds nothing to a request.

A thread of its own reads the kernel's ring, follows the connections and hands finished records to
the event loop, so that a busy loop does not lose packets and a burst of packets does not stop the
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Container, Mapping

from servoscope.exporters.records import RequestRecord, Source, SourceState, SourceStatus
from servoscope.sidecar.sources.source import OpenRequest, Sink
from servoscope.sidecar.tap.flows import FlowTable
from servoscope.sidecar.tap.listeners import LocalAddresses, listening_addresses, read_listeners
from servoscope.sidecar.tap.packet import parse_packet
from servoscope.sidecar.tap.preflight import tap_missing
from servoscope.sidecar.tap.ring import LOOPBACK, Ring, frames
from servoscope.sidecar.wire.clock import StepWatch, read_clocks
from servoscope.sidecar.wire.exchange import Exchange
from servoscope.sidecar.wire.limits import DEFAULT_LIMITS, Budget, Limits

__all__ = ["TapSource", "tap_missing", "where_to_listen"]

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.1
_RETRY_SECONDS = 2.0
_IDLE_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 5.0  # while nothing listens on the port yet
_MAX_WAITING_RECORDS = 100_000


class TapSource:
    """Watches requests to ``host:port`` on this host.

    ``interface`` None: loopback when the server listens on loopback only, else all interfaces (a
    wildcard or a real address is reached over loopback and over the network). ``server`` labels the
    records.
    """

    source = Source.TAP

    def __init__(
        self,
        host: str,
        port: int,
        interface: str | None = None,
        *,
        server: str | None = None,
        max_flows: int = 4096,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._host = host
        self._port = port
        self._wanted_interface = interface
        self._server = server or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._max_flows = max_flows
        self._limits = limits
        self._budget = Budget()
        self._drops: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._started = time.time()
        self._lock = threading.Lock()  # guards _flows, _drops: the capture thread's
        self._flows: FlowTable | None = None
        self._stopping = threading.Event()
        self.capturing = threading.Event()
        self._waiting = 0  # records handed to the loop and not yet to the sink
        self._packets = 0
        self._kernel_drops = 0
        self._where = ""
        self._fault = "not started"
        self._last_record: float | None = None  # by the monotonic clock
        self._last_record_at: float | None = None  # by the wall clock

    # ---- RequestSource ---------------------------------------------------------------------------

    async def run(self, sink: Sink) -> None:
        """Capture until cancelled; a fault (no right, no interface) is in ``status``, we retry."""
        loop = asyncio.get_running_loop()
        self._stopping.clear()
        thread = threading.Thread(
            target=self._capture_for_ever, args=(loop, sink), name="servoscope-tap", daemon=True
        )
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._stopping.set()
            while thread.is_alive():  # a tenth of a second at most
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            self._fault = "stopped"

    def status(self, now: float) -> SourceStatus:
        """Failed: cannot capture, or what is captured is TLS."""
        with self._lock:
            drops = dict(self._drops)
        state, detail = SourceState.OK, f"capturing port {self._port} on {self._where}"
        if self._fault:
            state, detail = SourceState.FAILED, self._fault
        elif drops.get("tls") and self._last_record is None:
            state = SourceState.FAILED
            detail = f"port {self._port} speaks TLS, which the tap cannot read; use the plug-in"
        elif self._last_record is None or now - self._last_record > _IDLE_SECONDS:
            state = SourceState.OK if self.open_requests() else SourceState.IDLE
        return SourceStatus(
            source=self.source,
            state=state,
            detail=detail,
            last_success_unix_seconds=self._last_record_at,
            blind_to=self._blind_to(),
        )

    def open_requests(self) -> list[OpenRequest]:
        """Requests in flight."""
        with self._lock:
            return self._flows.open_requests() if self._flows is not None else []

    def drops(self) -> Mapping[str, int]:
        """Packets lost by the kernel, and what could not be followed, by reason."""
        with self._lock:
            return dict(self._drops)

    @property
    def packets(self) -> int:
        """Packets captured so far."""
        return self._packets

    def _blind_to(self) -> tuple[str, ...]:
        blind = [
            "TLS, unix sockets, HTTP/2",
            "requests that were in flight when the capture began",
            "queue and prefill time, except where the engine reports them in its answers",
        ]
        if self._where == LOOPBACK:
            blind.append("requests that come over the network: only loopback is captured")
        return tuple(blind)

    # ---- the capture thread ----------------------------------------------------------------------

    def _capture_for_ever(self, loop: asyncio.AbstractEventLoop, sink: Sink) -> None:
        while not self._stopping.is_set():
            try:
                self._capture(loop, sink)
                continue
            except OSError as error:
                missing = tap_missing(self._host, self._port)
                self._fail(missing or f"capture on {self._where}: {error.strerror or error}")
            except Exception as error:
                # Only the error's type: its text may quote what was captured.
                self._fail(f"capture failed: {type(error).__name__}")
                with self._lock:
                    self._drops["capture_failed"] += 1
            finally:
                self.capturing.clear()
            self._stopping.wait(_RETRY_SECONDS)

    def _fail(self, why: str) -> None:
        if why != self._fault:
            _log.warning("tap: %s", why)
        self._fault = why

    def _capture(self, loop: asyncio.AbstractEventLoop, sink: Sink) -> None:
        listening = listening_addresses(read_listeners(self._port))
        interface, addresses = where_to_listen(self._host, self._wanted_interface, listening)
        nobody = listening is not None and not listening
        look_again = time.monotonic() + _LOOK_AGAIN_SECONDS
        self._where = interface or "all interfaces"
        clock = StepWatch(*read_clocks())
        with Ring(interface, self._port) as ring:
            with self._lock:
                flows = self._flows = FlowTable(
                    self._port,
                    self._exchange,
                    addresses=addresses,
                    max_flows=self._max_flows,
                    drops=self._drops,
                )
            self._fault = ""
            self.capturing.set()
            while not self._stopping.is_set():
                block = ring.take_block(_WAIT_SECONDS)
                if step := clock.look(*read_clocks()):
                    with self._lock:
                        flows.shift_clock(step)
                if block is not None:
                    self._hand_over(loop, sink, self._read(flows, block))
                self._count(ring)
                if nobody and time.monotonic() > look_again:
                    if read_listeners(self._port):
                        return  # now it is known where to listen: begin again
                    look_again = time.monotonic() + _LOOK_AGAIN_SECONDS

    def _read(self, flows: FlowTable, block: bytes) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        with self._lock:
            for offset, size, at in frames(block):
                segment = parse_packet(block, offset, size)
                if segment is not None:
                    records += flows.segment(segment, at)
        return records

    def _count(self, ring: Ring) -> None:
        self._packets, dropped = ring.statistics()
        if dropped > self._kernel_drops:
            with self._lock:
                self._drops["kernel_ring"] += dropped - self._kernel_drops
            self._kernel_drops = dropped

    def _hand_over(
        self, loop: asyncio.AbstractEventLoop, sink: Sink, records: list[RequestRecord]
    ) -> None:
        if not records:
            return
        with self._lock:
            room = max(0, _MAX_WAITING_RECORDS - self._waiting)
            if len(records) > room:
                self._drops["loop_behind"] += len(records) - room
                records = records[:room]
            self._waiting += len(records)
        with contextlib.suppress(RuntimeError):  # the loop has been closed: we are being stopped
            loop.call_soon_threadsafe(self._deliver, sink, records)

    def _deliver(self, sink: Sink, records: list[RequestRecord]) -> None:
        with self._lock:
            self._waiting -= len(records)
        for record in records:
            self._last_record = time.monotonic()
            self._last_record_at = record.finished_unix_seconds or time.time()
            sink(record)

    def _exchange(self, synced: bool) -> Exchange:
        return Exchange(
            source=self.source,
            server=self._server,
            # Unique also over restarts of the sidecar: requests without an id are named by it.
            connection=f"tap-{int(self._started * 1000):x}-{next(self._numbers)}",
            limits=self._limits,
            budget=self._budget,
            drops=self._drops,
            synced=synced,
        )


def where_to_listen(
    host: str, interface: str | None, listening: frozenset[bytes] | None
) -> tuple[str | None, Container[bytes]]:
    """(interface or None for all, server addresses to take).

    ``listening`` is what listens on the port: packed addresses, None when a wildcard does, empty
    when nothing was found (then the host's own address is the best guess). Requests to a real
    address come over the network, but those of this host itself come over loopback.
    """
    if listening is None:
        return interface, LocalAddresses()
    addresses = listening or _resolved(host)
    if interface is None and all(ipaddress.ip_address(a).is_loopback for a in addresses):
        interface = LOOPBACK
    return interface, addresses


def _resolved(host: str) -> frozenset[bytes]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(ipaddress.ip_address(address[0]).packed for *_, address in found)

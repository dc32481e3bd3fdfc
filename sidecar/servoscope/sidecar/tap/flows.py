"""All connections to one port: segments and their times in, records out. Pure, bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator

from servoscope.exporters.records import RequestRecord
from servoscope.sidecar.sources.source import OpenRequest
from servoscope.sidecar.tap.packet import ACK, FIN, RST, SYN, Segment
from servoscope.sidecar.tap.reassembly import Piece, Stream
from servoscope.sidecar.wire.exchange import Direction, Exchange

__all__ = ["FlowTable", "MakeExchange"]

#: ``make(synced)``: an Exchange for a new connection, or for one we join in the middle.
MakeExchange = Callable[[bool], Exchange]

_Key = tuple[bytes, int, bytes]  # client address and port, server address
_EVICTED_SHARE = 0.1
_UNUSUAL = SYN | FIN | RST


class _Flow:
    __slots__ = ("client", "exchange", "first", "seen_at", "server")

    def __init__(self, exchange: Exchange, first: int, at: float) -> None:
        self.exchange = exchange
        self.client = Stream()
        self.server = Stream()
        self.first = first  # the client's initial sequence number: tells a new connection
        self.seen_at = at


class FlowTable:
    """Connections to ``port`` on one of ``addresses`` (packed).

    A connection whose start we did not see is joined at the next request of its client; what was
    in flight then is in no record. Beyond ``max_flows`` the longest silent ones are given up, their
    open requests end as UNKNOWN.
    """

    def __init__(
        self,
        port: int,
        make_exchange: MakeExchange,
        *,
        addresses: Container[bytes],
        max_flows: int = 4096,
        drops: Counter[str] | None = None,
    ) -> None:
        self._port = port
        self._make = make_exchange
        self._addresses = addresses
        self._max_flows = max_flows
        self._flows: dict[_Key, _Flow] = {}
        self.drops: Counter[str] = Counter() if drops is None else drops

    def __len__(self) -> int:
        return len(self._flows)

    def segment(self, segment: Segment, at: float) -> list[RequestRecord]:
        """One segment, captured at ``at``; the records of requests that it ended."""
        key, from_client = self._key(segment)
        if key is None:
            return []
        flow = self._flows.get(key)
        if flow is not None and not segment.flags & _UNUSUAL:
            return self._usual(key, flow, segment, at, from_client=from_client)
        records: list[RequestRecord] = []
        if from_client and segment.flags & SYN:
            if flow is None or flow.first != segment.sequence:
                records += self._end(key, at)
                flow = self._new(key, segment.sequence, at, synced=True)
        elif flow is None:
            if not from_client or not segment.payload or segment.flags & RST:
                return records
            self.drops["joined_late"] += 1
            flow = self._new(key, segment.sequence, at, synced=False)
        if flow is not None:
            flow.seen_at = at
            records += self._advance(key, flow, segment, at, from_client=from_client)
        if len(self._flows) > self._max_flows:
            records += self._evict(at)
        return records

    def open_requests(self) -> list[OpenRequest]:
        """Requests in flight on all connections."""
        return [r for flow in self._flows.values() for r in flow.exchange.open_requests()]

    def close(self, at: float) -> list[RequestRecord]:
        """The capture ends: what is open ends as unknown."""
        return [record for key in list(self._flows) for record in self._end(key, at)]

    def shift_clock(self, seconds: float) -> None:
        """The clock behind the stamps was set by ``seconds``."""
        for flow in self._flows.values():
            flow.exchange.shift_clock(seconds)
            flow.seen_at += seconds

    # ---- one segment -----------------------------------------------------------------------------

    def _key(self, segment: Segment) -> tuple[_Key | None, bool]:
        """Which connection, and whether the client sent it; (None, …) when it is not ours."""
        port, ours = self._port, self._addresses
        to_us = segment.destination_port == port and segment.destination in ours
        from_us = segment.source_port == port and segment.source in ours
        client = (segment.source, segment.source_port, segment.destination)
        server = (segment.destination, segment.destination_port, segment.source)
        if to_us and from_us:  # a client that happens to use our port number as its own
            to_us = server not in self._flows and segment.flags & (SYN | ACK) != SYN | ACK
        if to_us:
            return client, True
        return (server, False) if from_us else (None, False)

    def _new(self, key: _Key, first: int, at: float, *, synced: bool) -> _Flow:
        flow = self._flows[key] = _Flow(self._make(synced), first, at)
        return flow

    def _usual(
        self, key: _Key, flow: _Flow, segment: Segment, at: float, *, from_client: bool
    ) -> list[RequestRecord]:
        """Data or an acknowledgement of an open connection: nearly every segment."""
        flow.seen_at = at
        mine, other = (flow.client, flow.server) if from_client else (flow.server, flow.client)
        if segment.acknowledged != other.next:
            return self._advance(key, flow, segment, at, from_client=from_client)
        if not segment.payload:
            return []
        pieces = mine.push(segment.sequence, segment.payload)
        if len(pieces) == 1 and pieces[0] is not None and not mine.ended:
            if from_client:
                return flow.exchange.client_bytes(pieces[0], at)
            return flow.exchange.server_bytes(pieces[0], at)
        direction = Direction.CLIENT if from_client else Direction.SERVER
        records = _deliver(flow.exchange, direction, pieces, at)
        return records + self._finish(key, flow, direction, at)

    def _advance(
        self, key: _Key, flow: _Flow, segment: Segment, at: float, *, from_client: bool
    ) -> list[RequestRecord]:
        mine, other = (flow.client, flow.server) if from_client else (flow.server, flow.client)
        direction, opposite = Direction.CLIENT, Direction.SERVER
        if not from_client:
            direction, opposite = opposite, direction
        flags, sequence, data = segment.flags, segment.sequence, segment.payload
        if flags & RST:
            close = flow.exchange.client_closed if from_client else flow.exchange.server_closed
            del self._flows[key]
            return close(at, reset=True)
        records: list[RequestRecord] = []
        if flags & SYN:
            sequence += 1
            mine.start(sequence)
        if flags & ACK:
            other.start(segment.acknowledged)
            if pieces := other.acknowledged(segment.acknowledged):
                records += _deliver(flow.exchange, opposite, pieces, at)
                records += self._finish(key, flow, opposite, at)
        if data:
            records += _deliver(flow.exchange, direction, mine.push(sequence, data), at)
        if flags & FIN:
            mine.start(sequence)
            mine.fin(sequence + len(data))
        if data or flags & FIN:
            records += self._finish(key, flow, direction, at)
        return records

    def _finish(
        self, key: _Key, flow: _Flow, direction: Direction, at: float
    ) -> list[RequestRecord]:
        """Tell the exchange when a direction has just come to its FIN; forget what is over."""
        stream = flow.client if direction is Direction.CLIENT else flow.server
        if not stream.ended:
            return []
        if direction is Direction.CLIENT:
            records = flow.exchange.client_closed(at)
        else:
            records = flow.exchange.server_closed(at)
        if flow.client.ended and flow.server.ended:
            self._flows.pop(key, None)
        return records

    # ---- giving up -------------------------------------------------------------------------------

    def _end(self, key: _Key, at: float) -> list[RequestRecord]:
        """The connection is replaced or evicted: we shall not see its end."""
        flow = self._flows.pop(key, None)
        return [] if flow is None else flow.exchange.abandoned(at)

    def _evict(self, at: float) -> list[RequestRecord]:
        oldest = sorted(self._flows, key=lambda key: self._flows[key].seen_at)
        doomed = oldest[: max(1, int(self._max_flows * _EVICTED_SHARE))]
        self.drops["flows_evicted"] += len(doomed)
        return [record for key in doomed for record in self._end(key, at)]


def _deliver(
    exchange: Exchange, direction: Direction, pieces: Iterable[Piece], at: float
) -> list[RequestRecord]:
    return list(_delivered(exchange, direction, pieces, at))


def _delivered(
    exchange: Exchange, direction: Direction, pieces: Iterable[Piece], at: float
) -> Iterator[RequestRecord]:
    feed = exchange.client_bytes if direction is Direction.CLIENT else exchange.server_bytes
    for piece in pieces:
        yield from exchange.gap(direction, at) if piece is None else feed(piece, at)

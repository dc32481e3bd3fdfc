"""The stats socket of one API server: ``stats-<pid>.sock``, and what feeds it.

Messages (JSON lines). From the engine: ``hello``; ``record`` {seq, ...} to the one subscriber;
``open`` {requests, total}; ``opened`` {requests} as they come, to the subscriber; ``status``
{...}; ``refused``/``error`` {why}. From the reader:
``{"op": "subscribe"}``, ``{"op": "ack", "seq": n}``, ``{"op": "open"}``, ``{"op": "status"}``.

Records are kept until acknowledged, so a sidecar that restarts misses none; without a sidecar
the buffer fills once and then drops the oldest. One subscriber at a time: a second one is
refused, and a subscriber that does not acknowledge for STALL_SECONDS is dropped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from servoscope.exporters.plugin.line_server import Connection, LineServer
from servoscope.exporters.plugin.record_buffer import RecordBuffer
from servoscope.exporters.plugin.sockets import remove_stale
from servoscope.exporters.vllm import facts
from servoscope.exporters.vllm.hooks import Hooks, install
from servoscope.exporters.vllm.http_exchange import watch_http
from servoscope.exporters.vllm.lifecycle import Lifecycle

__all__ = ["StatsFeed", "StatsHandler", "observe"]

READING_TICK_SECONDS = 0.05  # how late a record may reach the sidecar
IDLE_TICK_SECONDS = 1.0
STALL_SECONDS = 60.0
BATCH = 256
UNSENT_BYTES = 256 << 10  # do not encode more for a peer that has this much to read yet


class StatsHandler:
    """Answers the stats socket. Runs in the socket's thread only."""

    def __init__(
        self,
        buffer: RecordBuffer,
        life: Lifecycle,
        hooks: Hooks,
        hello: Callable[[], dict[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
        may_bypass: bool = False,
    ) -> None:
        self._buffer = buffer
        self._life = life
        self._hooks = hooks
        self._hello = hello
        self._clock = clock
        self._may_bypass = may_bypass
        self._reader: Connection | None = None
        self._sent = 0
        self._heard_at = 0.0

    def hello(self) -> dict[str, Any]:
        """Who this is."""
        return self._hello()

    def received(self, connection: Connection, message: dict[str, Any]) -> None:
        """One line of a reader."""
        op = message.get("op")
        if op == "subscribe":
            self._subscribe(connection)
        elif op == "ack" and connection is self._reader:
            seq = message.get("seq")
            if isinstance(seq, int) and not isinstance(seq, bool):
                self._buffer.acknowledge(min(seq, self._sent))
                self._heard_at = self._clock()
        elif op == "open":
            requests, total = self._life.snapshot()
            connection.send(
                {
                    "type": "open",
                    "requests": requests,
                    "total": total,
                    "received_by": self._life.received_by,
                    "ttft_by": self._life.ttft_by,
                }
            )
        elif op == "status":
            connection.send({"type": "status", **self._status()})
        elif op == "bypass" and self._may_bypass:
            self._hooks.bypass = bool(message.get("on"))
            connection.send({"type": "status", **self._status()})
        else:
            connection.send({"type": "error", "why": f"unknown op {op!r}"[:200]})

    def closed(self, connection: Connection) -> None:
        """What was not acknowledged stays for the next reader."""
        if connection is self._reader:
            self._reader = None
            self._life.announcing = self._hooks.bypass = False

    def tick(self, _connections: Iterable[Connection]) -> float:
        """Number new records, hand them to the reader, drop a reader that is stuck."""
        self._buffer.settle()
        reader = self._reader
        if reader is None:
            return IDLE_TICK_SECONDS
        now = self._clock()
        if self._sent > self._buffer.acknowledged and now - self._heard_at > STALL_SECONDS:
            reader.send({"type": "refused", "why": f"nothing acknowledged for {STALL_SECONDS:g} s"})
            reader.closing = True
            self._reader = None
            self._life.announcing = False
            return IDLE_TICK_SECONDS
        if self._sent <= self._buffer.acknowledged:
            self._heard_at = now  # nothing is owed
        # Before their records, so that a reader takes what has ended off its list again.
        if len(reader.out) < UNSENT_BYTES and (opened := self._life.take_opened()):
            reader.send({"type": "opened", "requests": opened})
        while len(reader.out) < UNSENT_BYTES:
            batch = self._buffer.after(self._sent, BATCH)
            if not batch:
                break
            for seq, message in batch:
                reader.send({**_plain(message), "seq": seq, "dropped": self._buffer.dropped})
                self._sent = seq
        return READING_TICK_SECONDS

    def _subscribe(self, connection: Connection) -> None:
        if self._reader is not None and self._reader is not connection:
            why = f"pid {self._reader.pid} reads this feed already"
            connection.send({"type": "refused", "why": why})
            connection.closing = True
            return
        self._reader = connection
        self._life.take_opened()  # of an earlier reader
        self._life.announcing = True
        self._buffer.settle()
        self._sent = self._buffer.acknowledged
        self._heard_at = self._clock()
        connection.send({"type": "subscribed", **self._status()})

    def _status(self) -> dict[str, Any]:
        return {
            "kept": len(self._buffer),
            "capacity": self._buffer.capacity,
            "last_seq": self._buffer.last,
            "dropped": self._buffer.dropped,
            "in_flight": len(self._life),
            "lost": self._life.lost,
            "beams": self._life.beams,
            "rejected": self._life.rejected,
            "received_by": self._life.received_by,
            "http_starts": self._life.http_starts,
            "engine_starts": self._life.engine_starts,
            "odd_starts": self._life.odd_starts,
            "ttft_by": self._life.ttft_by,
            "http_firsts": self._life.delivery.http_firsts,
            "engine_firsts": self._life.delivery.engine_firsts,
            "faults": self._hooks.faults,
            "off": self._hooks.off,
            "bypass": self._hooks.bypass,
        }


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """JSON values of a message: microseconds are enough for every time in it."""
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if isinstance(value, float):
            plain[key] = round(value, 6)
        elif key == "inter_token_seconds":
            plain[key] = [round(gap, 6) for gap in value]
        else:
            plain[key] = value
    return plain


class StatsFeed:
    """Observation of one API-server process: hooks, lifecycle, buffer and socket together."""

    def __init__(self, vllm_config: Any, rank: int) -> None:
        parallel = getattr(vllm_config, "parallel_config", None)
        ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
        self.pid = os.getpid()
        self.hooks = Hooks()
        self.buffer = RecordBuffer()
        self.life = Lifecycle(self.buffer.put, ranks=ranks, first_rank=rank)
        self.missing: list[str] = []
        self._config = vllm_config

    def hello(self) -> dict[str, Any]:
        """First line of the stats socket."""
        said = facts.hello(
            self._config,
            boot_values=facts.config_values(self._config),
            missing=self.missing,
            rank=None,
            off=self.hooks.off,
        )
        said["received_by"] = self.life.received_by
        said["ttft_by"] = self.life.ttft_by
        return said

    def watch_http(self) -> None:
        """Learn from the HTTP server when it received and answered, if one is loaded here."""
        self.life.http_watched = watch_http(self.hooks)

    def stepped(self, rank: int, scheduler_stats: Any, iteration_stats: Any) -> None:
        """From StatLogger.record; never raises."""
        self.hooks.run(self.life.stepped, rank, scheduler_stats, iteration_stats)
        if self.hooks.off or self.hooks.bypass:  # what had ended before still waits for its rank
            with contextlib.suppress(Exception):
                self.life.delivery.stepped(rank, iteration_stats)


def observe(
    vllm_config: Any,
    rank: int,
    directory: Path,
    group_name: str | None,
    classes: tuple[type, type, type] | None,
    *,
    off: str = "",
    may_bypass: bool = False,
) -> StatsFeed:
    """Start observing this process. ``classes``: OutputProcessor, IterationStats, AsyncLLM.

    Without classes nothing is hooked, and the socket says why (``off``).
    Raises OSError when the socket cannot be made; then nothing is hooked.
    """
    feed = StatsFeed(vllm_config, rank)
    handler = StatsHandler(feed.buffer, feed.life, feed.hooks, feed.hello, may_bypass=may_bypass)
    server = LineServer(directory / f"stats-{feed.pid}.sock", handler, group_name=group_name)
    remove_stale(directory, "stats-*.sock")
    remove_stale(directory, "knobs-*.sock")
    try:
        feed.missing = [] if classes is None else install(feed.hooks, feed.life, *classes)
    except Exception:
        feed.hooks.unwrap()
        server.stop()
        raise
    if feed.hooks.installed:
        feed.hooks.run(feed.watch_http)
    else:
        feed.hooks.off = off or f"unknown layout: {', '.join(feed.missing)}"
    os.register_at_fork(after_in_child=feed.hooks.unwrap)
    server.start()
    return feed

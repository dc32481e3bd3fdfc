"""Sidecar side of the stats socket: finished requests of one API server as RequestRecords.

``record_from_message`` is pure. ``StatsClient`` reads one socket until it ends; whoever uses it
re-attaches. Records are acknowledged after they were handed over, so a sidecar that dies in
between gets them again from the engine, and one that lives never gets one twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.vllm.lines import PROTOCOL, LineDecoder, encode_line
from servoscope.exporters.vllm.request_parts import MAX_GAPS
from servoscope.exporters.vllm.sockets import connect, sockets_of

__all__ = [
    "Hello",
    "ProtocolError",
    "StatsClient",
    "find_stats_sockets",
    "hello_from_message",
    "record_from_message",
]

READ_BYTES = 65536
HELLO_SECONDS = 5.0
OPEN_POLL_SECONDS = 1.0
MAX_TEXT = 256


class ProtocolError(RuntimeError):
    """The other side is no plug-in of a version we know, or it refused us; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First line of either socket."""

    protocol: int
    version: str  # of the plug-in
    engine: str
    engine_version: str
    boot_id: str  # one an engine process: another one means a restart
    pid: int
    rank: int | None = None
    model_names: tuple[str, ...] = ()
    started_unix_seconds: float | None = None
    boot_values: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # what this engine version lacks
    off: str = ""  # why the plug-in does nothing, '' when it works

    @property
    def model_name(self) -> str:
        """The name the model is served under first."""
        return self.model_names[0] if self.model_names else "unknown"


def find_stats_sockets(run_dirs: Iterable[Path], pids: Iterable[int]) -> list[Path]:
    """Stats sockets of these processes (pids as seen from here or from inside a container)."""
    return sockets_of(run_dirs, pids, "stats-{pid}.sock")


def hello_from_message(message: Mapping[str, Any]) -> Hello:
    """Check the first line. Raises ProtocolError."""
    kind = message.get("type")
    if kind == "refused":
        raise ProtocolError(f"the plug-in refused: {_text(message.get('why'))}")
    if kind != "hello":
        raise ProtocolError(f"first line is {kind!r}, not hello: no Servoscope plug-in"[:200])
    protocol = message.get("protocol")
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"protocol: the plug-in in the engine speaks {protocol!r}, this sidecar {PROTOCOL};"
            " install the same servoscope version in both and restart the older one"[:300]
        )
    pid, boot = message.get("pid"), message.get("boot_id")
    if not isinstance(pid, int) or not isinstance(boot, str):
        raise ProtocolError("hello: pid and boot_id are missing")
    names, values = message.get("model_names"), message.get("boot_values")
    missing = message.get("missing")
    return Hello(
        protocol=PROTOCOL,
        version=_text(message.get("version")) or "unknown",
        engine=_text(message.get("engine")) or "unknown",
        engine_version=_text(message.get("engine_version")) or "unknown",
        boot_id=boot[:MAX_TEXT],
        pid=pid,
        rank=_count(message.get("rank")),
        model_names=tuple(map(_text, names)) if isinstance(names, list) else (),
        started_unix_seconds=_number(message.get("started_unix_seconds")),
        boot_values=dict(values) if isinstance(values, dict) else {},
        missing=tuple(map(_text, missing)) if isinstance(missing, list) else (),
        off=_text(message.get("off")),
    )


def _text(value: object) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    """A finite number, or None (garbage in one field must not cost the others)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def record_from_message(message: Mapping[str, Any], hello: Hello) -> RequestRecord:
    """One ``record`` message as a RequestRecord.

    Raises ValueError naming the field when there is no id, or no outcome that we know. Any other
    field that is no number becomes None; impossible values are for ``refuse_impossible``.
    """
    ident = _text(message.get("request_id"))
    if not ident:
        raise ValueError("request_id: missing")
    try:
        outcome = Outcome(_text(message.get("outcome")))
    except ValueError:
        raise ValueError(f"outcome: {message.get('outcome')!r} is none we know"[:200]) from None
    try:
        phase = Phase(_text(message.get("phase")))
    except ValueError:
        phase = Phase.UNKNOWN
    gaps = message.get("inter_token_seconds")
    known = [_number(gap) for gap in gaps[:MAX_GAPS]] if isinstance(gaps, list) else []
    tokenless = message.get("pooling") is True  # embeddings have no first token
    return RequestRecord(
        request_id=ident,
        source=Source.PLUGIN,
        outcome=outcome,
        phase=phase,
        finish_reason=_text(message.get("finish_reason")) or None,
        status_code=_count(message.get("status_code")),
        engine=hello.engine,
        rank=_count(message.get("rank")),
        model_name=_text(message.get("lora")) or hello.model_name,
        endpoint=_text(message.get("endpoint")) or None,
        streaming=_flag(message.get("streaming")),
        received_unix_seconds=_number(message.get("received_unix_seconds")),
        first_token_unix_seconds=_number(message.get("first_token_unix_seconds")),
        finished_unix_seconds=_number(message.get("finished_unix_seconds")),
        queue_seconds=_number(message.get("queue_seconds")),
        prefill_seconds=None if tokenless else _number(message.get("prefill_seconds")),
        decode_seconds=None if tokenless else _number(message.get("decode_seconds")),
        time_to_first_token_seconds=_number(message.get("time_to_first_token_seconds")),
        time_per_output_token_seconds=_number(message.get("time_per_output_token_seconds")),
        max_inter_token_seconds=_number(message.get("max_inter_token_seconds")),
        e2e_seconds=_number(message.get("e2e_seconds")),
        inter_token_seconds=tuple(gap for gap in known if gap is not None),
        prompt_tokens=_count(message.get("prompt_tokens")),
        output_tokens=_count(message.get("output_tokens")),
        cached_tokens=_count(message.get("cached_tokens")),
        max_output_tokens=_count(message.get("max_output_tokens")),
        preemptions=_count(message.get("preemptions")),
    )


class StatsClient:
    """Reads one stats socket.

    Attributes: ``hello`` (after the first line), ``records_total``, ``dropped_total`` (what the
    engine had to drop), ``refused_total`` (records that made no sense), ``garbage_total`` (lines
    that were no message), ``in_flight`` (HTTP requests open in the engine: request_id, phase,
    prompt_tokens, received_unix_seconds, model_name) and ``in_flight_total`` (the list is capped).
    """

    def __init__(self, path: Path, *, open_poll_seconds: float = OPEN_POLL_SECONDS) -> None:
        self.path = path
        self.hello: Hello | None = None
        self.records_total = 0
        self.dropped_total = 0
        self.refused_total = 0
        self.duplicates_total = 0
        self.in_flight: list[dict[str, Any]] = []
        self.in_flight_total = 0
        self.last_refusal = ""
        self._decoder = LineDecoder()
        self._seen: tuple[str, int] = ("", 0)  # boot id, last number handed over
        self._poll_seconds = open_poll_seconds

    @property
    def garbage_total(self) -> int:
        """Lines that were no JSON object, or too long."""
        return self._decoder.garbage + self._decoder.oversize

    async def run(
        self,
        on_record: Callable[[RequestRecord], None],
        on_hello: Callable[[Hello], None] | None = None,
    ) -> None:
        """Hand over records until the socket ends (returns) or the task is cancelled.

        Raises OSError when nobody listens, ProtocolError when the other side is not ours, speaks
        another version, or refuses us. An error of ``on_record`` ends the run; that record is not
        acknowledged and comes again.
        """
        reader, writer = await asyncio.open_unix_connection(sock=await _connected(self.path))
        poll: asyncio.Task[None] | None = None
        try:
            first = await asyncio.wait_for(self._first(reader), HELLO_SECONDS)
            self.hello = hello_from_message(first[0])
            if on_hello is not None:
                on_hello(self.hello)
            if self.hello.off:
                raise ProtocolError(f"request observation is off: {self.hello.off}")
            writer.write(encode_line({"op": "subscribe"}))
            poll = asyncio.create_task(self._poll(writer))
            self._take(first[1:], on_record, writer)
            while data := await reader.read(READ_BYTES):
                self._take(self._decoder.feed(data), on_record, writer)
                await writer.drain()
        except TimeoutError:
            raise ProtocolError(f"no hello within {HELLO_SECONDS:g} s") from None
        except ConnectionError:
            return  # the engine is gone: the same as end of file
        finally:
            self.in_flight, self.in_flight_total = [], 0
            if poll is not None:
                poll.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await poll
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _first(self, reader: asyncio.StreamReader) -> list[dict[str, Any]]:
        """Messages up to at least the first."""
        while data := await reader.read(READ_BYTES):
            if messages := self._decoder.feed(data):
                return messages
            if self.garbage_total:
                break
        raise ProtocolError("the socket sent no hello: no Servoscope plug-in behind it")

    async def _poll(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(encode_line({"op": "open"}))
            await asyncio.sleep(self._poll_seconds)

    def _take(
        self,
        messages: Iterable[dict[str, Any]],
        on_record: Callable[[RequestRecord], None],
        writer: asyncio.StreamWriter,
    ) -> None:
        """Handle messages; one acknowledgement for all records among them."""
        handed = 0
        try:
            for message in messages:
                kind = message.get("type")
                if kind == "record":
                    handed = max(handed, self._record(message, on_record))
                elif kind == "open":
                    self._open(message)
                elif kind == "refused":
                    raise ProtocolError(f"the plug-in refused: {_text(message.get('why'))}")
                elif kind in ("subscribed", "status"):
                    self.dropped_total = _count(message.get("dropped")) or self.dropped_total
        finally:
            if handed:
                writer.write(encode_line({"op": "ack", "seq": handed}))

    def _record(self, message: dict[str, Any], on_record: Callable[[RequestRecord], None]) -> int:
        """Hand one record over; returns its number."""
        hello, seq = self.hello, _count(message.get("seq")) or 0
        if hello is None:
            return 0
        self.dropped_total = _count(message.get("dropped")) or self.dropped_total
        if self._seen[0] == hello.boot_id and 0 < seq <= self._seen[1]:
            self.duplicates_total += 1  # our acknowledgement was lost with the last connection
            return seq
        try:
            record = record_from_message(message, hello)
        except ValueError as error:
            self.refused_total += 1
            self.last_refusal = str(error)
        else:
            on_record(record)
            self.records_total += 1
        self._seen = (hello.boot_id, seq)
        return seq

    def _open(self, message: dict[str, Any]) -> None:
        found = message.get("requests")
        if not isinstance(found, list) or self.hello is None:
            return
        self.in_flight = [
            {
                "request_id": _text(one.get("request_id")),
                "phase": _text(one.get("phase")) or Phase.UNKNOWN.value,
                "prompt_tokens": _count(one.get("prompt_tokens")),
                "received_unix_seconds": _number(one.get("received_unix_seconds")),
                "model_name": _text(one.get("lora")) or self.hello.model_name,
            }
            for one in found
            if isinstance(one, dict)
        ]
        self.in_flight_total = max(_count(message.get("total")) or 0, len(self.in_flight))


async def _connected(path: Path) -> Any:
    """A connected socket. Unix connects answer at once or fail; long paths are handled."""
    peer = connect(path)
    peer.setblocking(False)
    return peer

"""Sidecar side of the stats socket: finished requests of one API server as RequestRecords.

``record_from_message`` is pure. ``StatsClient`` reads one socket until it ends; whoever uses it
re-attaches. Records are acknowledged after they were handed over, so a sidecar that dies in
between gets them again from the engine, and one that lives never gets one twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from servoscope.exporters.plugin.hello import (
    Hello,
    ProtocolError,
    clock_of,
    count_of,
    flag_of,
    hello_from_message,
    number_of,
    text_of,
)
from servoscope.exporters.plugin.lines import LineDecoder, encode_line
from servoscope.exporters.plugin.sockets import connect, sockets_of
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.vllm.request_parts import MAX_GAPS

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
MAX_OPEN = 4096  # requests in flight that are kept; the engine lists 1,000 and tells new ones


def find_stats_sockets(run_dirs: Iterable[Path], pids: Iterable[int]) -> list[Path]:
    """Stats sockets of these processes (pids as seen from here or from inside a container)."""
    return sockets_of(run_dirs, pids, "stats-{pid}.sock")


def record_from_message(message: Mapping[str, Any], hello: Hello) -> RequestRecord:
    """One ``record`` message as a RequestRecord.

    Raises ValueError naming the field when there is no id, or no outcome that we know. Any other
    field that is no number becomes None; impossible values are for ``refuse_impossible``.
    """
    ident = text_of(message.get("request_id"))
    if not ident:
        raise ValueError("request_id: missing")
    try:
        outcome = Outcome(text_of(message.get("outcome")))
    except ValueError:
        raise ValueError(f"outcome: {message.get('outcome')!r} is none we know"[:200]) from None
    try:
        phase = Phase(text_of(message.get("phase")))
    except ValueError:
        phase = Phase.UNKNOWN
    gaps = message.get("inter_token_seconds")
    known = [number_of(gap) for gap in gaps[:MAX_GAPS]] if isinstance(gaps, list) else []
    tokenless = message.get("pooling") is True  # embeddings have no first token
    return RequestRecord(
        request_id=ident,
        source=Source.PLUGIN,
        outcome=outcome,
        phase=phase,
        finish_reason=text_of(message.get("finish_reason")) or None,
        status_code=count_of(message.get("status_code")),
        engine=hello.engine,
        rank=count_of(message.get("rank")),
        model_name=text_of(message.get("lora")) or hello.model_name,
        request_type_hint=text_of(message.get("request_type_hint")) or None,
        tenant=text_of(message.get("tenant")),
        endpoint=text_of(message.get("endpoint")) or None,
        streaming=flag_of(message.get("streaming")),
        received_unix_seconds=number_of(message.get("received_unix_seconds")),
        first_token_unix_seconds=number_of(message.get("first_token_unix_seconds")),
        finished_unix_seconds=number_of(message.get("finished_unix_seconds")),
        queue_seconds=number_of(message.get("queue_seconds")),
        prefill_seconds=None if tokenless else number_of(message.get("prefill_seconds")),
        decode_seconds=None if tokenless else number_of(message.get("decode_seconds")),
        time_to_first_token_seconds=number_of(message.get("time_to_first_token_seconds")),
        time_per_output_token_seconds=number_of(message.get("time_per_output_token_seconds")),
        max_inter_token_seconds=number_of(message.get("max_inter_token_seconds")),
        e2e_seconds=number_of(message.get("e2e_seconds")),
        inter_token_seconds=tuple(gap for gap in known if gap is not None),
        prompt_tokens=count_of(message.get("prompt_tokens")),
        output_tokens=count_of(message.get("output_tokens")),
        cached_tokens=count_of(message.get("cached_tokens")),
        max_output_tokens=count_of(message.get("max_output_tokens")),
        preemptions=count_of(message.get("preemptions")),
    )


class StatsClient:
    """Reads one stats socket.

    Attributes: ``hello`` (after the first line), ``records_total``, ``dropped_total`` (what the
    engine had to drop), ``refused_total`` (records that made no sense), ``garbage_total`` (lines
    that were no message), ``in_flight`` (HTTP requests open in the engine: request_id, phase,
    prompt_tokens, received_unix_seconds, model_name, request_type_hint), ``in_flight_total`` (the
    list is capped), ``received_by`` and ``ttft_by`` (whose clock starts a request, and whose
    ends TTFT of a streamed answer: ``http`` or ``engine``).
    What was in flight stays readable when the engine is gone.
    """

    def __init__(self, path: Path, *, open_poll_seconds: float = OPEN_POLL_SECONDS) -> None:
        self.path = path
        self.hello: Hello | None = None
        self.records_total = 0
        self.dropped_total = 0
        self.refused_total = 0
        self.duplicates_total = 0
        self.received_by = "engine"
        self.ttft_by = "engine"
        self.last_refusal = ""
        self._open: dict[str, dict[str, Any]] = {}
        self._unlisted = 0  # open, and beyond the list's cap
        self._decoder = LineDecoder()
        self._seen: tuple[str, int] = ("", 0)  # boot id, last number handed over
        self._poll_seconds = open_poll_seconds

    @property
    def garbage_total(self) -> int:
        """Lines that were no JSON object, or too long."""
        return self._decoder.garbage + self._decoder.oversize

    @property
    def in_flight(self) -> list[dict[str, Any]]:
        """Requests open in the engine as it last said."""
        return list(self._open.values())

    @property
    def in_flight_total(self) -> int:
        """How many there are, listed or not."""
        return len(self._open) + self._unlisted

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
        self._open, self._unlisted = {}, 0
        reader, writer = await asyncio.open_unix_connection(sock=await _connected(self.path))
        poll: asyncio.Task[None] | None = None
        gone = False
        try:
            first = await asyncio.wait_for(self._first(reader), HELLO_SECONDS)
            self.hello = hello_from_message(first[0])
            self.received_by = self.hello.received_by
            self.ttft_by = self.hello.ttft_by
            if on_hello is not None:
                on_hello(self.hello)
            if self.hello.off:
                raise ProtocolError(f"request observation is off: {self.hello.off}")
            writer.write(encode_line({"op": "subscribe"}))
            self._take(first[1:], on_record, writer)
            while data := await reader.read(READ_BYTES):
                self._take(self._decoder.feed(data), on_record, writer)
                await writer.drain()
                if poll is None:
                    # Not before the answer: a line sent to an engine that refuses and closes would
                    # fail, and that failure would be heard instead of its reason.
                    poll = asyncio.create_task(self._poll(writer))
            gone = True
        except TimeoutError:
            raise ProtocolError(f"no hello within {HELLO_SECONDS:g} s") from None
        except ConnectionError:
            gone = True  # the same as end of file
        finally:
            if not gone:
                self._open, self._unlisted = {}, 0
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
                    self._list(message)
                elif kind == "opened":
                    self._add(message.get("requests"))
                elif kind == "refused":
                    raise ProtocolError(f"the plug-in refused: {text_of(message.get('why'))}")
                elif kind in ("subscribed", "status"):
                    self.dropped_total = count_of(message.get("dropped")) or self.dropped_total
                    self._hear_clocks(message)
        finally:
            if handed:
                writer.write(encode_line({"op": "ack", "seq": handed}))

    def _record(self, message: dict[str, Any], on_record: Callable[[RequestRecord], None]) -> int:
        """Hand one record over; returns its number."""
        hello, seq = self.hello, count_of(message.get("seq")) or 0
        if hello is None:
            return 0
        self.dropped_total = count_of(message.get("dropped")) or self.dropped_total
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
        self._open.pop(text_of(message.get("request_id")), None)
        return seq

    def _list(self, message: dict[str, Any]) -> None:
        """All that is open, as the engine lists it."""
        found = message.get("requests")
        if not isinstance(found, list):
            return
        self._hear_clocks(message)
        self._open.clear()
        self._add(found)
        self._unlisted = max(0, (count_of(message.get("total")) or 0) - len(self._open))

    def _hear_clocks(self, message: dict[str, Any]) -> None:
        self.received_by = clock_of(message, "received_by") or self.received_by
        self.ttft_by = clock_of(message, "ttft_by") or self.ttft_by

    def _add(self, found: object) -> None:
        """What has come since the last list."""
        if not isinstance(found, list) or self.hello is None:
            return
        for one in found:
            if not isinstance(one, dict) or len(self._open) >= MAX_OPEN:
                continue
            ident = text_of(one.get("request_id"))
            self._open[ident] = {
                "request_id": ident,
                "phase": text_of(one.get("phase")) or Phase.UNKNOWN.value,
                "prompt_tokens": count_of(one.get("prompt_tokens")),
                "received_unix_seconds": number_of(one.get("received_unix_seconds")),
                "model_name": text_of(one.get("lora")) or self.hello.model_name,
                "request_type_hint": text_of(one.get("request_type_hint")) or None,
            }


async def _connected(path: Path) -> Any:
    """A connected socket. Unix connects answer at once or fail; long paths are handled."""
    peer = connect(path)
    peer.setblocking(False)
    return peer

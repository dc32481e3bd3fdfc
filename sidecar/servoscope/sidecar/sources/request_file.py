"""Requests as SGLang writes them to a file of its own: the first choice for that engine.

Nothing of ours runs in the engine and nothing stands in the path of a request. What the file holds
is decided when the engine starts: without ``--log-requests --log-requests-level 0`` (or 1) the
prompts are in it, and then this source does not read it unless it is told to; even then nothing of
them is kept. Two engines that write in one directory write in one file, and a line does not say
whose it is: that is refused as well.

A request whose client went away ends without a line (seen with 0.5.23: ten of ten). Where the
engine's spans come too (``sources.otlp``) those are told by their spans, each once: a request that
was cancelled and of which no line has come two seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from servoscope.exporters.records import (
    Outcome,
    RequestRecord,
    Source,
    SourceState,
    SourceStatus,
)
from servoscope.exporters.sglang.requests import read_line
from servoscope.exporters.sglang.settings import Settings
from servoscope.sidecar.attach.sglang import EngineFiles
from servoscope.sidecar.sources.position import PositionFile
from servoscope.sidecar.sources.source import OpenRequest, Sink
from servoscope.sidecar.sources.tail import Tail

__all__ = ["BLIND_TO", "LEFT_UNSEEN", "START_FLAGS", "RequestFileSource", "not_written"]

log = logging.getLogger(__name__)

START_FLAGS = (
    "--enable-metrics --export-metrics-to-file --export-metrics-to-file-dir DIR "
    "--log-requests --log-requests-level 0"
)
TEXT_HINT = (
    "the engine writes prompts into its request file, which is therefore not read; start it with "
    "--log-requests --log-requests-level 0, or say sidecar.sglang_allow_prompt_text: true (nothing "
    "of them is kept then either)"
)
LEFT_UNSEEN = (
    "requests whose client went away: SGLang ends them without a line, so the numbers are too good "
    "by what they had waited; sidecar.otlp adds them, and the tap sees them"
)
BLIND_TO = (
    "requests that the HTTP front end answers itself (4xx), and HTTP status codes",
    "gaps between tokens, and requests before they end",
    "time on the wire and in the HTTP server before its handler runs",
)
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_CHECK_SECONDS = 15.0  # who else writes there: reads the process table
_IDLE_SECONDS = 60.0
_TEXT_SECONDS = 60.0  # after a line with text that nobody expected
_TOO_OLD_SECONDS = 3_600.0
_LINE_SECONDS = 2.0  # a line is written within milliseconds of the end of its request
_MAX_RECENT = 20_000
_MAX_LEFT = 10_000


def not_written(settings: Settings, *, allow_text: bool) -> str | None:
    """Why this engine gives no file to read, ``None`` when it does."""
    if not settings.file or settings.file_dir is None:
        what = "does not write" if settings.file is False else "does not say whether it writes"
        return f"the engine {what} a request file; start it with {START_FLAGS}"
    if settings.writes_text and not allow_text:
        return TEXT_HINT
    return None


class RequestFileSource:
    """``find`` tells about the engine as it is now (cheap; another object after a restart).

    ``spans``: whether its spans come too, and ``left`` is called with what they tell.
    """

    source = Source.FILE

    def __init__(
        self,
        find: Callable[[], EngineFiles],
        *,
        server: str,
        positions: Path | None,
        allow_text: bool = False,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        poll_seconds: float = _POLL_SECONDS,
        spans: Callable[[], bool] = lambda: False,
    ) -> None:
        self._find = find
        self._spans = spans
        self._recent: OrderedDict[str, None] = OrderedDict()  # ids of lines
        self._left: deque[tuple[float, RequestRecord]] = deque()  # cancelled, by the spans
        self._server = server
        self._positions = positions
        self._allow_text = allow_text
        self._clock = clock
        self._steady = steady
        self._poll_seconds = poll_seconds
        self._tail: Tail | None = None
        self._position: PositionFile | None = None
        self._drops: Counter[str] = Counter()
        self._refused = ""  # the last line or value that was not believed
        self._others: list[int] = []
        self._looked_at = self._checked_at = float("-inf")
        self._text_at: float | None = None  # a line with text that was not expected
        self._last_record: float | None = None
        self._last_record_at: float | None = None
        self._fault = ""
        self.settled = False

    def missing(self) -> str | None:
        """Why it cannot be used now, ``None`` when it can."""
        files = self._find()
        why = not_written(files.settings, allow_text=self._allow_text)
        if why is not None:
            return why
        if not self.settled:
            return "not looked at yet"  # what is written now could still be before our start
        if self._text_at is not None and self._steady() - self._text_at < _TEXT_SECONDS:
            return TEXT_HINT
        if self._others:
            return (
                f"other engines write to {files.told_directory} too (pid "
                f"{', '.join(map(str, self._others[:5]))}) and a line does not say whose it is; "
                "give each engine its own --export-metrics-to-file-dir"
            )
        return self._fault or None

    async def run(self, sink: Sink) -> None:
        """Hand over requests as they are written, until cancelled."""
        try:
            while True:
                records, more = await asyncio.to_thread(self._round)
                self.settled = True
                for record in records:
                    self._remember(record)
                for record in [*records, *self._without_line()]:
                    self._last_record = self._steady()
                    self._last_record_at = record.finished_unix_seconds or self._clock()
                    sink(record)
                if not more:
                    await asyncio.sleep(self._poll_seconds)
        finally:
            self._drop_tail()

    def status(self, now: float) -> SourceStatus:
        """Its state; ``off`` where the engine writes no such file."""
        missing = self.missing()
        state, detail = SourceState.OK, f"reading {self._find().told_directory}"
        if missing is not None:
            told = self._find().settings
            state = SourceState.FAILED if told.file else SourceState.OFF
            detail = missing
        elif self._last_record is None or now - self._last_record > _IDLE_SECONDS:
            state = SourceState.IDLE
        notes = [detail, self._position.problem if self._position else "", self._without_times()]
        return SourceStatus(
            source=self.source,
            state=state,
            detail="; ".join(note for note in notes if note),
            last_success_unix_seconds=self._last_record_at,
            blind_to=BLIND_TO if self._spans() else (LEFT_UNSEEN, *BLIND_TO),
        )

    def left(self, record: RequestRecord) -> None:
        """A request as its spans tell it; only one that was cancelled is of interest here."""
        if record.outcome is not Outcome.CANCELLED:
            return
        if len(self._left) >= _MAX_LEFT:
            self._left.popleft()
            self._drops["left_table_full"] += 1
        self._left.append((self._steady() + _LINE_SECONDS, record))

    def open_requests(self) -> Iterable[OpenRequest]:
        """None: a line is written when a request has ended."""
        return ()

    def drops(self) -> Mapping[str, int]:
        """Lines that gave no record, by reason."""
        tail = self._tail
        return self._drops + tail.drops if tail is not None else Counter(self._drops)

    def _remember(self, record: RequestRecord) -> None:
        self._recent[_plain_id(record)] = None
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def _without_line(self) -> list[RequestRecord]:
        """Those that were cancelled a while ago and have no line."""
        found: list[RequestRecord] = []
        while self._left and self._left[0][0] <= self._steady():
            _, record = self._left.popleft()
            if _plain_id(record) not in self._recent:
                found.append(record)
        return found

    def _without_times(self) -> str:
        if self._find().settings.metrics is False:
            return "no times but e2e: the engine runs without --enable-metrics"
        return ""

    # ---- in a thread ---------------------------------------------------------------------------

    def _round(self) -> tuple[list[RequestRecord], bool]:
        """Read once; returns the records and whether there is more to read at once."""
        files, now = self._find(), self._steady()
        if not_written(files.settings, allow_text=self._allow_text) is not None:
            self._drop_tail()
            return [], False
        if files.directory is None:
            self._fault = (
                f"the engine's directory {files.settings.file_dir} cannot be found from here; run "
                "this sidecar where the engine's processes can be seen, or name it absolutely"
            )
            return [], False
        if now - self._checked_at >= _CHECK_SECONDS:
            self._checked_at, self._others = now, files.others()
        if self._others:
            self._drop_tail()
            return [], False
        tail = self._tail_of(files)
        look = now - self._looked_at >= _LOOK_SECONDS
        if look:
            self._looked_at = now
        lines = tail.poll(look=look)
        self._fault = tail.problem
        found = (self._record(line) for line in lines)
        return [record for record in found if record is not None], tail.behind

    def _tail_of(self, files: EngineFiles) -> Tail:
        directory, told = files.directory, files.told_directory
        if self._tail is not None and self._tail.directory == directory:
            return self._tail
        self._drop_tail()
        if directory is None or told is None:
            raise ValueError("no directory to read")
        if self._positions is not None:
            self._position = PositionFile(self._positions, self._server, told)
        self._tail = Tail(directory, self._position)
        return self._tail

    def _drop_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            self._drops.update(tail.drops)
            with contextlib.suppress(OSError):
                tail.close()

    def _record(self, line: bytes) -> RequestRecord | None:
        try:
            told = read_line(line)
        except ValueError as error:
            reason = "refused_record" if ":" in str(error) else "garbage_line"
            self._note(reason, str(error))
            return None
        if told.text and not self._allow_text:
            self._text_at = self._steady()
            self._note("prompt_text", "a line with a prompt in it")
            return None
        if told.record is None:
            self._note(told.why, told.why)
            return None
        for refused in told.refused:
            self._note("refused_value", f"{refused.name} {refused.why}")
        ended = told.record.finished_unix_seconds
        if ended is not None and ended < self._clock() - _TOO_OLD_SECONDS:
            self._note("too_old", "a request that ended more than an hour ago")
            return None
        return told.record

    def _note(self, reason: str, what: str) -> None:
        self._drops[reason] += 1
        if self._drops[reason] == 1:
            log.info("request file of %s: %s (further ones are only counted)", self._server, what)


def _plain_id(record: RequestRecord) -> str:
    """The id as spans have it: without the number of the tokenizer worker before it."""
    return record.request_id.rsplit("_", 1)[-1]

"""Reading an engine's own /metrics: one bounded GET, its states, and how often to do it.

``fetch`` is the shell; ``ScrapeState`` is pure and keeps five things apart that must never look
alike: failed (no answer, or an error answer), bad value (an answer with values that were refused),
stale (answers, but no good reading for too long), idle (healthy, nothing to report) and ok.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp

from servoscope.exporters.packed import Packed, PackedError, PackedTooLargeError
from servoscope.exporters.records import EngineSample, Source, SourceState, SourceStatus

__all__ = ["BLIND_TO", "Fetched", "ScrapeState", "fetch"]

BLIND_TO = (
    "single requests: request types, tenants, streaming or not",
    "client disconnects, rejections and failures as such",
    "SLI counters and goodput: the engine's bucket edges cannot decide them",
    "quantiles finer than the engine's own buckets",
)
# Packing would cost the engine more than it saves on this host. Some servers pack all the same.
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
_PLAIN = frozenset({"", "identity"})
_GZIP = frozenset({"gzip", "x-gzip"})
_PIECE_BYTES = 65_536
_STALE_INTERVALS = 3.0
_MAX_RETRY_SECONDS = 15.0
_MAX_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Fetched:
    """One try. ``text`` is ``None`` when it failed; then ``reason`` is a short word for it.

    It is handed on in bytes: only the parser can say of bytes that are no text that they were bad.
    """

    text: bytes | None
    seconds: float  # what it cost: the fetch, and what was added to it
    reason: str = ""
    detail: str = ""
    answered: bool = True  # an HTTP answer of any status came

    def and_reading(self, seconds: float) -> Fetched:
        """The same try, with the time that the parser took for its text."""
        return dataclasses.replace(self, seconds=self.seconds + max(0.0, seconds))


async def fetch(
    session: aiohttp.ClientSession, url: str, *, timeout_seconds: float, max_bytes: int
) -> Fetched:
    """GET ``url`` within ``timeout_seconds`` for the whole answer, ``max_bytes`` at most, as sent
    and unpacked.

    Never raises for a fault of the other side.
    """
    start = time.monotonic()

    def failed(reason: str, detail: str, *, answered: bool = False) -> Fetched:
        return Fetched(None, time.monotonic() - start, reason, detail, answered)

    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    answered = False
    try:
        async with session.get(
            url, timeout=timeout, headers=_HEADERS, allow_redirects=False, auto_decompress=False
        ) as answer:
            answered = True
            if answer.status != 200:
                hint = _status_hint(answer.status)
                return failed(f"http_{answer.status}", f"HTTP {answer.status}{hint}", answered=True)
            text = await _body(answer, max_bytes)
    except _BodyError as error:
        return failed(error.reason, str(error), answered=True)
    except TimeoutError:
        return failed("timeout", f"no whole answer in {timeout_seconds:g} s", answered=answered)
    except aiohttp.ClientConnectorError as error:
        return failed("refused", str(error))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return failed("connection", str(error) or type(error).__name__, answered=answered)
    return Fetched(text, time.monotonic() - start)


class _BodyError(Exception):
    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


async def _body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body, unpacked here: how far aiohttp would unpack a piece depends on its version.

    Raises _BodyError.
    """
    coding = ", ".join(answer.headers.getall("Content-Encoding", ())).strip().lower()
    if coding not in _PLAIN | _GZIP:
        raise _BodyError("encoding", f"packed as {coding[:40]!r}, which was not asked for")
    packed = Packed(max_bytes) if coding in _GZIP else None
    body, came = bytearray(), 0
    try:
        async for piece in answer.content.iter_chunked(_PIECE_BYTES):
            came += len(piece)
            if came > max_bytes:  # gzip that holds nothing can go on for ever
                raise _BodyError("too_large", f"more than {max_bytes} bytes")
            body += packed.feed(piece) if packed else piece
        if packed:
            packed.finish()
    except PackedTooLargeError as error:
        raise _BodyError("too_large", str(error)) from error
    except PackedError as error:
        raise _BodyError("encoding", str(error)) from error
    return bytes(body)


def _status_hint(status: int) -> str:
    if status == 501:
        return ": the engine was started without its metrics (llama.cpp: --metrics)"
    if status in (401, 403):
        return ": the engine wants a key for /metrics"
    return ""


class ScrapeState:
    """What the last reads say. ``now`` is by the monotonic clock: ages must survive a step of the
    wall clock. ``at`` is seconds since the epoch, only to be published.
    """

    def __init__(
        self, *, interval_seconds: float, max_interval_seconds: float, cost_ratio: float
    ) -> None:
        self._interval = interval_seconds
        self._max_interval = max_interval_seconds
        self._cost_ratio = cost_ratio
        self._failures = 0  # in a row
        self._last_good: float | None = None
        self._last_good_at: float | None = None  # by the wall clock
        self._first_try: float | None = None
        self._read_seconds: float | None = None
        self._detail = ""
        self._verdict = SourceState.IDLE  # of the last answer: ok, idle, bad_value, failed
        self.errors: Counter[str] = Counter()
        self.up: bool | None = None  # does the engine answer HTTP at all?

    def failed(self, fetched: Fetched, now: float) -> None:
        """A try that gave no text."""
        self._tried(fetched, now)
        self._failures += 1
        self._verdict = SourceState.FAILED
        self._detail = fetched.detail[:_MAX_DETAIL_CHARACTERS]
        self.errors[fetched.reason] += 1

    def read(
        self, fetched: Fetched, sample: EngineSample, *, busy: bool, now: float, at: float
    ) -> None:
        """An answer and what the parser made of it. ``busy``: work runs, waits or was done."""
        self._tried(fetched, now)
        self._failures = 0
        nothing = not sample.readings and not sample.histograms
        if sample.refused:
            first = sample.refused[0]
            more = f" and {len(sample.refused) - 1} more" if len(sample.refused) > 1 else ""
            self._bad(f"refused {first.name}={first.value} ({first.why}){more}")
        elif nothing and (fetched.text or b"").strip():
            self._bad(f"nothing in the answer is a metric of {sample.engine}")
        elif not nothing:
            self._verdict = SourceState.OK if busy else SourceState.IDLE
            self._detail = ""
        if not nothing:
            self._last_good, self._last_good_at = now, at

    def status(self, now: float) -> SourceStatus:
        """The state in force at ``now``."""
        state, detail = self._verdict, self._detail
        since = self._last_good if self._last_good is not None else self._first_try
        if state in (SourceState.OK, SourceState.IDLE) and since is not None:
            age = now - since
            if age > _STALE_INTERVALS * self.next_interval():
                state = SourceState.STALE
                detail = f"the last good reading is {age:.0f} s old"
        return SourceStatus(
            source=Source.SCRAPE,
            state=state,
            detail=detail,
            last_success_unix_seconds=self._last_good_at,
            read_seconds=self._read_seconds,
            blind_to=BLIND_TO,
        )

    def next_interval(self) -> float:
        """Seconds to the next try: doubled for each failure in a row, longer for slow answers.

        After failures no more than ``_MAX_RETRY_SECONDS``, or the interval itself where that is
        longer: an engine that came back is seen soon. What costs too much may wait longer.
        """
        if self._failures:
            most = max(self._interval, min(_MAX_RETRY_SECONDS, self._max_interval))
            return min(self._interval * float(2 ** min(self._failures, 16)), most)
        slow = (self._read_seconds or 0.0) / self._cost_ratio
        return min(max(self._interval, slow), self._max_interval)

    def _tried(self, fetched: Fetched, now: float) -> None:
        if self._first_try is None:
            self._first_try = now
        self._read_seconds = fetched.seconds
        self.up = fetched.answered

    def _bad(self, detail: str) -> None:
        self._verdict = SourceState.BAD_VALUE
        self._detail = detail[:_MAX_DETAIL_CHARACTERS]
        self.errors["bad_value"] += 1

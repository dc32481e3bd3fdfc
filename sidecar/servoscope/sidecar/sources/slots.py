"""Asks llama.cpp for its slots (``/slots``) more often than /metrics is read: control needs it.

While it answers, running requests and KV usage are published from here; waiting ones only
/metrics tells. Three things make it stay silent, and none is a fault:

* The server may unload its model when idle (``--sleep-idle-seconds``). A question for /slots wakes
  it, or puts its sleep off; one for /props or /metrics does not (seen with b11549). So where that
  may be, /slots is asked only while /metrics shows work.
* The answer carries what people wrote (``exporters.llamacpp.slots``): then it is not asked again.
* It is off (``--no-slots``), wants a key, or this build has none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from servoscope.exporters.llamacpp.props import Props, read_props
from servoscope.exporters.llamacpp.slots import Slots, read_slots
from servoscope.exporters.records import Source, SourceState, SourceStatus
from servoscope.sidecar.sources.load_poll import LoadPoll, PollOptions

if TYPE_CHECKING:
    import aiohttp

    from servoscope.exporters.llamacpp.settings import Settings
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.publish.engine_metrics import EngineMetrics
    from servoscope.sidecar.sources.scrape import Fetched

__all__ = ["BLIND_TO", "SlotsPoll"]

_OFF = {
    "http_501": (
        "the engine was started without /slots: --no-slots, or a build of late 2024 to 2025 "
        "without --slots"
    ),
    "http_404": "this build has no /slots",
    "http_401": "the engine wants a key for /slots",
    "http_403": "the engine wants a key for /slots",
}
_TEXT = (
    "the answer of /slots carries what people wrote (a build before b6337, or "
    "LLAMA_SERVER_SLOTS_DEBUG): it was not kept, and is not asked for again in this life of the "
    "engine"
)
_ASLEEP = "the engine sleeps: a question for /slots would wake it"
_MAY_SLEEP = (
    "the engine may sleep when idle, and a question for /slots would put that off: it is asked "
    "only while /metrics shows work"
)
_FROM_METRICS = "running comes from /metrics, in the rhythm of the scrape"
BLIND_TO = (
    "what happens between two questions",
    "requests that wait for a slot: /metrics tells those",
    "prompts and answers, by intent",
)
_KV_UNKNOWN = (
    "how full the KV cache is: whether the slots share it is told by the command line of the "
    "engine, which cannot be seen, and builds before b6337 do not say what a slot holds"
)
_NOBODY = object()


class SlotsPoll(LoadPoll):
    """Of one server. ``busy``: whether /metrics shows work."""

    max_bytes = 4 * 1024 * 1024
    #: The answer waits for the engine's step to end. That costs the engine nothing, unlike the
    #: making of a large text, so more of the time may pass in waiting than a scrape may take.
    cost_ratio = 0.25

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Callable[[], Target],
        metrics: EngineMetrics,
        *,
        settings: Callable[[], Settings],
        busy: Callable[[], bool],
        **options: Unpack[PollOptions],
    ) -> None:
        super().__init__(session, target, metrics, **options)
        self._settings = settings
        self._busy = busy
        self._silent = ""  # why /slots is not asked, or has nothing; no fault
        self._text_of: object = _NOBODY  # the life of the engine whose /slots carry text
        self._slots: Slots | None = None

    async def once(self) -> None:
        """One question, or none where it would do harm."""
        target = self._target()
        if self._text_of == target.identity:
            return
        self._text_of = _NOBODY
        if why := await self._harm(target):
            self._be_silent(why)
            return
        fetched = await self._fetch(target, "/slots")
        if fetched.reason in _OFF:
            self._be_silent(_OFF[fetched.reason], rests=True)
            return
        self._silent, self._rests = "", False
        now = self._steady()
        if fetched.text is None:
            self._fail(fetched, now)
            return
        try:
            slots = read_slots(fetched.text, unified=self._settings().unified)
            fetched = fetched.and_reading(self._steady() - now)
        except ValueError as error:
            self._fail(dataclasses.replace(fetched, reason="garbage", detail=str(error)), now)
            return
        if slots.carries_text:
            self._text_of = target.identity
            self._be_silent(_TEXT, rests=True)
            return
        self._take(fetched, slots, now)

    def status(self, now: float) -> SourceStatus:
        """As the other sources have it; ``off`` or ``idle`` where it has a reason to be silent."""
        status = self._state.status(now)
        state, detail = status.state, status.detail
        blind: tuple[str, ...] = BLIND_TO
        if self._silent:
            state = SourceState.OFF if self._rests else SourceState.IDLE
            detail = self._silent
        elif self._slots is not None and state in (SourceState.OK, SourceState.IDLE):
            detail = _seen(self._slots)
            if self._slots.sample.peak("kv_usage_ratio") is None:
                blind = (*blind, _KV_UNKNOWN)
        if state not in (SourceState.OK, SourceState.IDLE) or self._silent:
            detail = f"{detail}; {_FROM_METRICS}" if detail else _FROM_METRICS
        return dataclasses.replace(
            status, source=Source.LOADS, state=state, detail=detail, blind_to=blind
        )

    async def _harm(self, target: Target) -> str:
        """Why asking for /slots would do harm now; empty when it would not."""
        sleeps = self._settings().sleeps
        if sleeps is False:
            return ""
        props = await self._asked_props(target)
        if sleeps is None and props is not None and props.sleeping is None:
            return ""  # a build that cannot sleep
        if props is not None and props.sleeping:
            return _ASLEEP
        return "" if self._busy() else _MAY_SLEEP

    async def _asked_props(self, target: Target) -> Props | None:
        """``None`` where /props does not answer: then the worst is assumed."""
        fetched = await self._fetch(target, "/props")
        if fetched.text is None:
            return None
        try:
            return read_props(_json(fetched.text))
        except ValueError:
            self._state.errors["garbage"] += 1
            return None

    def _take(self, fetched: Fetched, slots: Slots, now: float) -> None:
        for refused in slots.sample.refused:
            self.refused[refused.name.rpartition(".")[2].partition("[")[0]] += 1
        self._slots = slots
        self._publish(fetched, slots.sample, now, busy=bool(slots.processing))

    def _be_silent(self, why: str, *, rests: bool = False) -> None:
        self._silent, self._rests, self._slots = why, rests, None
        self._metrics.loads_gone()

    def _fail(self, fetched: Fetched, now: float) -> None:
        self._slots = None
        super()._fail(fetched, now)


def _seen(slots: Slots) -> str:
    each = f" of {slots.context_tokens} tokens" if slots.context_tokens is not None else ""
    return f"{slots.processing} of {slots.total} slots{each} work"


def _json(text: bytes) -> Any:
    """Parsed, or ``None``; the parser's error would hold the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

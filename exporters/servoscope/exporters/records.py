"""The vocabulary every part shares: requests, engine samples, GPUs, knobs.

Units are in the names. Times that end in ``_unix_seconds`` are wall-clock seconds since the
epoch; durations end in ``_seconds``. ``None`` means "this source could not see it", never zero.
Standard library only: this module is also imported inside serving engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from servoscope.exporters.plausibility import (
    COUNT_FIELDS,
    DURATION_FIELDS,
    MAX_TOKENS,
    Refused,
    implausible,
)

__all__ = [
    "COUNT_FIELDS",
    "DURATION_FIELDS",
    "MAX_TOKENS",
    "WIRE_FIELDS",
    "EngineSample",
    "GpuSample",
    "HistogramReading",
    "Knob",
    "KnobMode",
    "Outcome",
    "Phase",
    "Reading",
    "Refused",
    "RequestRecord",
    "Source",
    "SourceState",
]


class Outcome(StrEnum):
    """How a request ended. What each counts for in an SLI is decided in ``alerts.verdict``."""

    COMPLETED = "completed"
    LENGTH = "length"
    ERROR = "error"
    TIMEOUT = "timeout"
    STUCK = "stuck"
    REJECTED = "rejected"  # 429 and 503: the server refused work it could not take
    CLIENT_ERROR = "client_error"  # any other 4xx: the client's fault, in no SLI
    CLIENT_DISCONNECT = "client_disconnect"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"  # lost packets, or no source saw the end


class Phase(StrEnum):
    """Where in its life a request was when it ended (or is now, while open)."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"


class Source(StrEnum):
    """Where a number came from."""

    PLUGIN = "plugin"  # our plug-in inside the engine
    FILE = "file"  # the file of finished requests that the engine writes (SGLang)
    TAP = "tap"  # passive capture of the engine's port
    RELAY = "relay"  # our pass-through in the request path
    OTLP = "otlp"  # trace spans that the engine sends us
    SCRAPE = "scrape"  # the engine's own /metrics
    LOADS = "loads"  # the engine's load report, for gauges only: no request comes from it


class SourceState(StrEnum):
    """The state of a source. The last two are not faults: they must never look like one."""

    OK = "ok"
    FAILED = "failed"  # no answer, or an error answer
    STALE = "stale"  # answers, but the last good reading is too old
    BAD_VALUE = "bad_value"  # answers, but values had to be refused
    IDLE = "idle"  # healthy, and nothing has happened to report
    OFF = "off"  # not in use


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One finished request as one source saw it, completed by attach and classify.

    ``time_per_output_token_seconds`` is (last token - first token) / (output_tokens - 1) and is
    ``None`` below two output tokens. ``queue_seconds`` runs from the engine's arrival (or the last
    byte of the request on the wire) to its first scheduling.
    """

    request_id: str
    source: Source
    outcome: Outcome
    phase: Phase = Phase.UNKNOWN
    finish_reason: str | None = None
    status_code: int | None = None

    engine: str = "unknown"
    server: str = "unknown"
    rank: int | None = None
    model_name: str = "unknown"
    model_version: str = "unknown"
    gpu_model: str = "none"
    request_type: str = ""  # filled by classify
    request_type_hint: str | None = None  # x-request-type header, where the source sees headers
    tenant: str = ""
    endpoint: str | None = None  # URL path, without query
    streaming: bool | None = None

    received_unix_seconds: float | None = None
    first_token_unix_seconds: float | None = None
    finished_unix_seconds: float | None = None

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token_seconds: float | None = None
    time_to_first_answer_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    max_inter_token_seconds: float | None = None
    e2e_seconds: float | None = None
    inter_token_seconds: tuple[float, ...] = ()  # bounded by the source; not sent to the collector

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    max_output_tokens: int | None = None
    preemptions: int | None = None

    def refuse_impossible(self, now: float, max_seconds: float = 86_400.0) -> list[Refused]:
        """Replace impossible values by ``None`` and say which (fault 5 of known-faults).

        A duration or count that is negative, not finite, or longer than ``max_seconds``; more
        cached than prompt tokens; an end in the future or before its start. Nothing else of the
        record is lost.
        """
        return implausible(self, now, max_seconds)


#: Fields of a record in wire order (sidecar -> collector). ``inter_token_seconds`` stays behind.
WIRE_FIELDS: tuple[str, ...] = tuple(
    f.name for f in fields(RequestRecord) if f.name != "inter_token_seconds"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one signal. ``name`` is the catalogue's, without the product prefix."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """One histogram as the engine published it.

    ``buckets`` are (upper edge, cumulative count), sorted by edge, the last edge is +Inf.
    """

    name: str
    buckets: tuple[tuple[float, float], ...]
    sum: float
    count: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What one read of an engine's metrics said."""

    engine: str
    version: str | None
    readings: tuple[Reading, ...]
    histograms: tuple[HistogramReading, ...] = ()
    absent: tuple[str, ...] = ()  # core signals this version does not have, or this text lacked
    unknown: tuple[str, ...] = ()  # engine names in the text that no table line knows
    refused: tuple[Refused, ...] = ()

    def total(self, name: str) -> float | None:
        """Sum of a counter or an additive gauge over ranks; ``None`` when absent."""
        values = [r.value for r in self.readings if r.name == name]
        return math.fsum(values) if values else None

    def peak(self, name: str) -> float | None:
        """Largest value over ranks, for ratios that must not be summed; ``None`` when absent."""
        values = [r.value for r in self.readings if r.name == name]
        return max(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU at one moment. ``None`` where the device or the driver does not say."""

    index: int
    uuid: str
    gpu_model: str
    pids: tuple[int, ...] = ()
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()  # (field, why it is None)


class KnobMode(StrEnum):
    """What can be done with a knob on this engine, now."""

    LIVE = "live"
    RESTART = "restart"
    OBSERVE = "observe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting of an engine: what it is, what it may be, and how it can be changed."""

    name: str
    mode: KnobMode
    unit: str
    value: float | None
    boot_value: float | None
    minimum: float | None
    maximum: float | None
    why: str = ""  # why it is not live, or what bounds it

    def as_json(self) -> dict[str, Any]:
        """The knob as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class SourceStatus:
    """What ``servoscope_source_*`` and ``inspect`` say of one source."""

    source: Source
    state: SourceState = SourceState.OFF
    detail: str = ""  # in words: what failed, what to do next
    last_success_unix_seconds: float | None = None
    read_seconds: float | None = None
    blind_to: tuple[str, ...] = field(default=())  # what this source cannot see

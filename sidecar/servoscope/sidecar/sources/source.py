"""What a source of finished requests is: the plug-in, the tap and the relay all look like this.

Life of a source: it is built with its target; ``run`` is started once and lasts until it is
cancelled; it connects, loses and finds again what it reads from by itself and never raises for a
fault of the other side (the fault is its ``status``). ``status``, ``open_requests`` and ``drops``
may be asked at any time, also before ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from servoscope.exporters.records import Phase, RequestRecord, Source, SourceStatus

__all__ = ["OpenRequest", "RequestSource", "Sink"]

Sink = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that was received and has not ended, as its source sees it now."""

    request_id: str
    phase: Phase
    prompt_tokens: int | None = None
    received_unix_seconds: float | None = None
    request_type_hint: str | None = None
    model_name: str | None = None


class RequestSource(Protocol):
    """One way to see requests. After a record was handed to the sink it belongs to the sink."""

    @property
    def source(self) -> Source:
        """Which one it is."""

    async def run(self, sink: Sink) -> None:
        """Hand every finished request to ``sink``, once, until cancelled."""

    def status(self, now: float) -> SourceStatus:
        """Its state at ``now`` (monotonic clock), in words, and what it cannot see."""

    def open_requests(self) -> Iterable[OpenRequest]:
        """Requests that it sees in flight; empty when it cannot tell."""

    def drops(self) -> Mapping[str, int]:
        """Records or packets lost so far by reason; every count only grows."""

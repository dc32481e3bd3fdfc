"""What the sidecar says of itself and of what is in flight, brought up to date before each render.

Counters kept elsewhere (drops, refusals, folded labels, pushes) are copied here, never added to, so
that rendering twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from servoscope.exporters.records import (
    Outcome,
    RequestRecord,
    Source,
    SourceState,
    SourceStatus,
)
from servoscope.sidecar.measure.labels import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from servoscope.sidecar.measure.classify import Classifier
    from servoscope.sidecar.measure.pipeline import Identity
    from servoscope.sidecar.publish.families import Registry
    from servoscope.sidecar.sources.source import OpenRequest

    Shown = Callable[[str, str], str]  # label, value -> the value under the label's cap

__all__ = ["SelfMetrics", "product_version"]

_STATES = tuple(s for s in SourceState if s is not SourceState.OFF)
_HEALTHY = (SourceState.OK, SourceState.IDLE)
_MAX_IN_FLIGHT_SERIES = 500


def product_version() -> str:
    """The installed version of Servoscope."""
    try:
        return version("servoscope")
    except PackageNotFoundError:  # run from a tree that is not installed
        return "0"


class SelfMetrics:
    """Writes one server's self metrics into a registry."""

    def __init__(self, registry: Registry, engine: str, server: str) -> None:
        self._registry = registry
        self._server = (engine, server)
        self._in_flight: dict[tuple[str, ...], float] = {}
        registry.family("build_info").set((product_version(),), 1)

    def sources(self, statuses: Iterable[SourceStatus]) -> None:
        """Up, state, age and cost of every source that is in use."""
        up: dict[tuple[str, ...], float] = {}
        state: dict[tuple[str, ...], float] = {}
        seconds: dict[tuple[str, ...], float] = {}
        last: dict[tuple[str, ...], float] = {}
        for status in statuses:
            if status.state is SourceState.OFF:
                continue
            key = (*self._server, status.source.value)
            up[key] = float(status.state in _HEALTHY)
            for each in _STATES:
                state[*key, each.value] = float(each is status.state)
            if status.read_seconds is not None:
                seconds[key] = status.read_seconds
            if status.last_success_unix_seconds is not None:
                last[key] = status.last_success_unix_seconds
        family = self._registry.family
        family("source_up").replace(up)
        family("source_state").replace(state)
        family("source_read_seconds").replace(seconds)
        family("source_last_success_timestamp_seconds").replace(last)

    def counters(self, name: str, totals: Mapping[Any, float]) -> None:
        """A counter by its labels after (engine, server); totals only grow."""
        family = self._registry.family(name)
        for labels, total in totals.items():
            family.raise_to((*self._server, *labels), total)

    def gauges(self, name: str, values: Mapping[Any, float]) -> None:
        """A gauge by its labels after (engine, server); it says exactly this."""
        family = self._registry.family(name)
        family.replace({(*self._server, *labels): v for labels, v in values.items()})

    def in_flight(
        self,
        requests: Iterable[OpenRequest],
        identity: Identity,
        classifier: Classifier,
        shown: Shown,
    ) -> None:
        """Open requests by type and phase, under the caps that finished requests have.

        A label set that was seen stays, at 0, until its model or type lost its place.
        """
        counts = {
            key: 0.0
            for key in self._in_flight
            if shown("model_name", key[2]) == key[2] and shown("request_type", key[5]) == key[5]
        }
        for request in requests:
            model = request.model_name or identity.model_name
            key = (
                *self._server, shown("model_name", model), identity.model_version,
                identity.gpu_model,
                shown("request_type", _type_of(request, model, classifier)), request.phase.value,
            )  # fmt: skip
            if key not in counts and len(counts) >= _MAX_IN_FLIGHT_SERIES:
                key = (*key[:2], OTHER, key[3], key[4], OTHER, key[6])
            counts[key] = counts.get(key, 0.0) + 1
        self._in_flight = counts
        self._registry.family("requests_in_flight").replace(counts)


def _type_of(request: OpenRequest, model: str, classifier: Classifier) -> str:
    """The type by what is known while a request runs: not its output length."""
    return classifier.classify(
        RequestRecord(
            request_id=request.request_id,
            source=Source.PLUGIN,
            outcome=Outcome.UNKNOWN,
            model_name=model,
            request_type_hint=request.request_type_hint,
            prompt_tokens=request.prompt_tokens,
            received_unix_seconds=request.received_unix_seconds,
        )
    )

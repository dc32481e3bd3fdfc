"""Knobs and scheduler counters of every rank into the catalogue's families. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.records import KnobMode
from servoscope.sidecar.control.kinds import knob_kind
from servoscope.sidecar.measure.totals import Totals

if TYPE_CHECKING:
    from servoscope.sidecar.control.kinds import KnobKind
    from servoscope.sidecar.measure.pipeline import Identity
    from servoscope.sidecar.publish.families import Registry

__all__ = ["KnobMetrics"]

#: family -> field of a KnobState
_COUNTERS = {
    "scheduler_steps_total": "steps",
    "scheduled_tokens_total": "scheduled_tokens",
    "scheduler_cpu_seconds_total": "scheduler_cpu_seconds",
    "plugin_cpu_seconds_total": "plugin_cpu_seconds",
}
_GAUGES = ("knob_value", "knob_boot_value", "knob_bound", "knob_mode", "step_tokens_max")


class KnobMetrics:
    """Publishes what ``KnobControl.states`` returned."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._totals: Totals[tuple[str, str]] = Totals()
        self._identity: Identity | None = None

    def publish(
        self, states: Sequence[KnobState], identity: Identity, epoch: Hashable = None
    ) -> None:
        """``epoch``: which life of the engine the states are from."""
        if identity != self._identity:
            self._totals, self._identity = Totals(), identity
            for name in _COUNTERS:
                self._registry.family(name).clear()
        if not states:
            for name in _GAUGES:
                self._registry.family(name).clear()
            return
        kind = knob_kind(identity.engine)
        if kind is None or kind.counts_steps:
            self._counters(states, identity, epoch)
        if kind is not None:
            self._knobs(states, identity, kind)

    def _counters(self, states: Sequence[KnobState], identity: Identity, epoch: Hashable) -> None:
        fleet = (
            identity.engine, identity.server, identity.model_name, identity.model_version,
            identity.gpu_model,
        )  # fmt: skip
        readings = {
            (name, _rank(state)): float(getattr(state, field))
            for state in states
            for name, field in _COUNTERS.items()
        }
        self._totals.observe(readings, epoch)
        for (name, rank), total in self._totals.totals().items():
            self._registry.family(name).raise_to((*fleet, rank), total)
        largest: dict[tuple[str, ...], float] = {
            (*fleet, _rank(state)): float(state.step_tokens_max) for state in states
        }
        self._registry.family("step_tokens_max").replace(largest)

    def _knobs(self, states: Sequence[KnobState], identity: Identity, kind: KnobKind) -> None:
        where = (identity.engine, identity.server)
        values: dict[tuple[str, ...], float] = {}
        boots: dict[tuple[str, ...], float] = {}
        bounds: dict[tuple[str, ...], float] = {}
        modes: dict[tuple[str, ...], float] = {}
        for state in states:
            for knob in kind.describe([state]):
                key = (*where, _rank(state), knob.name)
                if knob.value is not None:
                    values[key] = knob.value
                if knob.boot_value is not None:
                    boots[key] = knob.boot_value
                if knob.minimum is not None:
                    bounds[*key, "min"] = knob.minimum
                if knob.maximum is not None:
                    bounds[*key, "max"] = knob.maximum
        for knob in kind.describe(states):
            for mode in KnobMode:
                modes[*where, knob.name, mode.value] = float(mode is knob.mode)
        family = self._registry.family
        family("knob_value").replace(values)
        family("knob_boot_value").replace(boots)
        family("knob_bound").replace(bounds)
        family("knob_mode").replace(modes)


def _rank(state: KnobState) -> str:
    return str(state.rank)

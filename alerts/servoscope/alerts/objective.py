"""The values of a spec: an objective, a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from servoscope.alerts.problems import SpecError

__all__ = [
    "OVER_FACTOR",
    "WHERE_LABELS",
    "WINDOWS_SECONDS",
    "Disconnects",
    "Objective",
    "Sli",
    "Spec",
    "SpecError",
]

#: "p99 above 1.5 x SLO" is a share of requests above this factor times the threshold (contracts).
OVER_FACTOR = 1.5
WINDOWS_SECONDS: tuple[int, ...] = (7 * 86_400, 28 * 86_400, 30 * 86_400)

#: Labels an objective may select on: facts of one request that are known when it is observed.
WHERE_LABELS: tuple[str, ...] = (
    "engine",
    "server",
    "model_name",
    "model_version",
    "gpu_model",
    "request_type",
    "tenant",
    "streaming",
)


class Sli(StrEnum):
    """What an objective measures."""

    TIME_TO_FIRST_TOKEN = "time_to_first_token"  # noqa: S105 - a token of text
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"  # noqa: S105
    E2E = "e2e"
    ERROR_RATIO = "error_ratio"

    @property
    def is_latency(self) -> bool:
        """True when the SLI compares a duration with a threshold."""
        return self is not Sli.ERROR_RATIO

    @property
    def is_token_milestone(self) -> bool:
        """True for TTFT and TPOT: SLIs that only generated tokens can have."""
        return self in (Sli.TIME_TO_FIRST_TOKEN, Sli.TIME_PER_OUTPUT_TOKEN)


class Disconnects(StrEnum):
    """What a client that leaves (client_disconnect, cancelled) counts for."""

    STANDARD = "standard"  # by what had been reached when it left
    BAD = "bad"  # as a failure of the service


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One promise of one service. ``threshold_seconds`` is None for ``error_ratio`` only."""

    service: str
    name: str
    sli: Sli
    threshold_seconds: float | None
    target_ratio: float
    window_seconds: int
    where: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    disconnects: Disconnects = Disconnects.STANDARD
    description: str = ""

    @property
    def id(self) -> str:
        """``service-name``: unique in a spec, the ``sloth_id`` of its series."""
        return f"{self.service}-{self.name}"

    @property
    def budget_ratio(self) -> float:
        """Share of requests that may be bad: 1 - target, without binary dust."""
        return round(1.0 - self.target_ratio, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The objectives of one service. ``origin`` is the file, for messages and headers."""

    service: str
    objectives: tuple[Objective, ...]
    origin: str = ""

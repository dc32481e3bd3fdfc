"""One running collector: its settings, its objectives, its store and the ways into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from servoscope.collector.inquiry import Inquiry
from servoscope.collector.intake import Intake
from servoscope.collector.overview import Interval
from servoscope.collector.store import Store
from servoscope.collector.telemetry import Telemetry

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.collector.config import CollectorConfig

__all__ = ["Collector"]


class Collector:
    """The parts of one running collector."""

    def __init__(
        self,
        config: CollectorConfig,
        objectives: Sequence[Objective],
        clock: Callable[[], float],
        store: Store | None,
        monotonic: Callable[[], float],
    ) -> None:
        self.config = config
        self.objectives = tuple(objectives)
        self.clock = clock
        self.token = config.read_token()
        self.telemetry = Telemetry()
        self.store = store or Store(
            config.database,
            now=clock(),
            memory_limit_mebibytes=config.memory_limit_mebibytes,
            threads=config.threads,
        )
        self.intake = Intake(
            self.store, self.objectives, config, self.telemetry, clock=clock, monotonic=monotonic
        )
        self.inquiry = Inquiry(self.store, config, self.telemetry)

    def close(self) -> None:
        """Store what was taken, answer what was asked, let go of the file."""
        self.intake.close()
        self.inquiry.close()
        self.store.close()

    def interval(self, window_seconds: float, since: float | None, until: float | None) -> Interval:
        """The interval of a question now. Raises IntervalError."""
        return Interval.asked(
            window_seconds=window_seconds,
            since=since,
            until=until,
            now=self.clock(),
            max_seconds=self.config.max_window_seconds,
        )

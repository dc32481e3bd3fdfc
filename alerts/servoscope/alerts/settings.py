"""Every number and selector that the rules use and a spec does not state, with its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from servoscope.alerts.duration import prometheus_duration

__all__ = ["RuleSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """Change these only with a reason; the defaults page within 3 min and resolve within 7.

    All ``*_seconds`` are whole seconds. The scrape interval should be 15 s or less: the shortest
    window holds 120 s and a rate needs two samples.
    """

    sidecar_job: str = "servoscope-sidecar"  # regular expression on `job`
    runbook_base_url: str = "http://127.0.0.1:9780/runbooks"  # the collector serves them
    dashboard_url: str = "http://127.0.0.1:3000/d/servoscope-overview"

    # p99 above 1.5 x threshold
    over_share: float = 0.01  # "p99" is: more than 1 % of requests
    over_window_seconds: int = 300
    confirm_window_seconds: int = 120  # still going on; also how fast an alert can end
    over_minimum_events: int = 20  # requests in the window, or there is no p99 to speak of
    over_minimum_over: int = 5  # requests above 1.5 x: a single slow one pages nobody

    # budget burn
    burn_minimum_events: int = 100  # in the long window: at 10 requests an hour one error is 10 %
    burn_minimum_bad: int = 10  # or this many bad ones, when they are
    burn_minimum_bad_ratio: float = 0.5  # at least this share: total failure at low traffic pages

    # engines and sidecars
    stall_window_seconds: int = 120
    long_stall_window_seconds: int = 600  # however busy the scheduler looks
    pending_seconds: int = 60  # `for` of page alerts: one odd evaluation pages nobody
    sidecar_pending_seconds: int = 120  # a sidecar may be restarted by hand
    absent_pending_seconds: int = 600
    # Holds through a gap of 4 min between two bursts of one incident: one page, not a series.
    keep_firing_seconds: int = 120

    def validate(self) -> RuleSettings:
        """Self. Raises ValueError naming the field that cannot be compiled."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_seconds"):
                try:
                    prometheus_duration(value)
                except ValueError as error:
                    raise ValueError(f"{f.name}: {error}") from error
            elif f.name.startswith(("over_minimum", "burn_minimum")) and value <= 0:
                raise ValueError(f"{f.name}: must be above 0, not {value!r}")
        if not 0 < self.over_share < 1:
            raise ValueError(f"over_share: must be between 0 and 1, not {self.over_share!r}")
        if self.confirm_window_seconds >= self.over_window_seconds:
            raise ValueError("confirm_window_seconds: must be shorter than over_window_seconds")
        return self

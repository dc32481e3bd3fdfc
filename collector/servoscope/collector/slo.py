"""Error budgets from counted verdicts. Pure: objectives, records and counts in, numbers out.

What a request counts for is decided in ``servoscope.alerts.verdict``; here verdicts are added up by
minute, and a budget is read from the sums:

    allowed    = total * (1 - target)          bad requests the window may hold
    remaining  = 1 - bad / allowed             1 untouched, 0 used up, below 0 overspent
    burn (1 h) = (bad / total over the last hour) / (1 - target)

Burn 1 uses the budget up exactly at the end of the window. The budget counts requests, not time
(SRE Workbook, chapter 5). Without traffic both are ``None``: nothing was promised to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from servoscope.alerts.verdict import verdict

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective
    from servoscope.exporters.records import RequestRecord

__all__ = [
    "HOUR_SECONDS",
    "MINUTE_SECONDS",
    "Budget",
    "Judgement",
    "Tally",
    "budget",
    "judge",
]

MINUTE_SECONDS = 60
HOUR_SECONDS = 3600


@dataclass(slots=True)
class Tally:
    """Verdicts of one objective in one minute. ``good + bad == total``; ``over`` is part of bad."""

    good: int = 0
    total: int = 0
    over: int = 0
    censored: int = 0


@dataclass(slots=True)
class Judgement:
    """What a batch of records counts for.

    ``tallies`` by (minute in unix seconds, service, objective). ``meets`` has one entry a record:
    True when every objective that counts it is met, None when none counts it (goodput).
    """

    tallies: dict[tuple[int, str, str], Tally] = field(default_factory=dict)
    meets: list[bool | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The state of one objective's budget."""

    service: str
    objective: str
    target_ratio: float
    window_seconds: float
    total: int
    good: int
    bad: int
    remaining_ratio: float | None
    burn_1h: float | None


def judge(
    objectives: Sequence[Objective], records: Iterable[RequestRecord], now: float
) -> Judgement:
    """Judge ``records``. A record counts in the minute in which it finished, else in ``now``'s.

    ``meets`` is ``verdict.meets_all`` read off the verdicts that are counted here anyway.
    """
    minutes: dict[int, list[Tally]] = {}
    meets: list[bool | None] = []
    for record in records:
        finished = record.finished_unix_seconds
        minute = int(now if finished is None else finished) // MINUTE_SECONDS * MINUTE_SECONDS
        tallies = minutes.get(minute)
        if tallies is None:
            tallies = minutes[minute] = [Tally() for _ in objectives]
        met: bool | None = None
        for objective, tally in zip(objectives, tallies, strict=True):
            one = verdict(objective, record)
            if one.counted:
                tally.total += 1
                tally.good += one.good
                tally.over += one.over
                met = one.good if met is None else met and one.good
            elif one.censored:
                tally.censored += 1
        meets.append(met)
    return Judgement(
        tallies={
            (minute, objective.service, objective.name): tally
            for minute, tallies in minutes.items()
            for objective, tally in zip(objectives, tallies, strict=True)
            if tally.total or tally.censored
        },
        meets=meets,
    )


def budget(
    objective: Objective, *, total: int, good: int, hour_total: int, hour_good: int
) -> Budget:
    """The budget of ``objective`` from its counts over its window and over the last hour.

    Raises ValueError for counts that cannot be: negative, or more good than total.
    """
    for name, part, whole in (("good", good, total), ("hour_good", hour_good, hour_total)):
        if not 0 <= part <= whole:
            raise ValueError(f"{name}: {part} of {whole}")
    allowed = objective.budget_ratio
    return Budget(
        service=objective.service,
        objective=objective.name,
        target_ratio=objective.target_ratio,
        window_seconds=float(objective.window_seconds),
        total=total,
        good=good,
        bad=total - good,
        remaining_ratio=1.0 - (total - good) / (total * allowed) if total else None,
        burn_1h=(hour_total - hour_good) / hour_total / objective.budget_ratio
        if hour_total
        else None,
    )

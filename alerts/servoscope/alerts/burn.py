"""Burn-rate arithmetic of the page tier. Pure.

Two legs, each a long window that says how much budget is gone and a short one that says it is still
going: 2 % of the budget within 1 h (confirmed over 5 m), 5 % within 6 h (confirmed over 30 m). The
factor follows from the objective's window: share x window / long window. For 30 d that is the
familiar 14.4 and 6; for 28 d 13.44 and 5.6; for 7 d 3.36 and 1.4 (Google SRE Workbook, chapter 5,
table 5-8, which gives the shares and windows).

A leg fires above factor x budget. For a modest objective that is out of reach: at 90 % the fast leg
would need 144 % bad requests, at 95 % it needs 72 %. Such a threshold is lowered to halfway between
the budget and a total failure, and the leg's ``note`` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servoscope.alerts.duration import format_duration

if TYPE_CHECKING:
    from servoscope.alerts.spec import Objective

__all__ = ["BurnLeg", "burn_notes", "page_legs"]

#: share of the budget, long window, short window (seconds)
_PAGE_LEGS = ((0.02, 3600, 300), (0.05, 21_600, 1800))

#: With this many bad requests expected at the threshold, a window that has none by chance while the
#: burn goes on has a probability of exp(-3), 5 %; to end a page it must stay so for minutes.
_RECOVERY_EXPECTED_BAD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnLeg:
    """One pair of windows. It fires when both error ratios are above ``threshold_ratio``."""

    long_seconds: int
    short_seconds: int
    budget_share: float  # of the budget, spent when the long window reaches the threshold
    factor: float  # times the budget
    threshold_ratio: float
    recovery_events: int  # events of a short healthy window that prove the end of the burn
    note: str = ""


def page_legs(objective: Objective) -> tuple[BurnLeg, ...]:
    """The fast and the slow page leg of ``objective``; every threshold is below 1."""
    return tuple(_leg(objective, *row) for row in _PAGE_LEGS)


def burn_notes(objective: Objective) -> list[str]:
    """What had to be adapted for ``objective``, in words; empty when nothing was."""
    return [leg.note for leg in page_legs(objective) if leg.note]


def _leg(objective: Objective, share: float, long_seconds: int, short_seconds: int) -> BurnLeg:
    budget = objective.budget_ratio
    wanted = round(share * objective.window_seconds / long_seconds, 9)
    highest = (1.0 + budget) / 2.0
    threshold, note = wanted * budget, ""
    if threshold > highest:
        why = "can never fire" if threshold >= 1.0 else "fires only near total failure"
        note = (
            f"{objective.id}: a burn of {wanted:g} x the budget over "
            f"{format_duration(long_seconds)} needs {100 * threshold:.4g} % bad requests and {why} "
            f"at a target of {100 * objective.target_ratio:g} %; lowered to "
            f"{highest / budget:.4g} x, {100 * highest:.4g} %"
        )
        threshold = highest
    factor = wanted if not note else highest / budget
    return BurnLeg(
        long_seconds=long_seconds,
        short_seconds=short_seconds,
        budget_share=round(threshold / budget * long_seconds / objective.window_seconds, 9),
        factor=round(factor, 9),
        threshold_ratio=round(threshold, 9),
        recovery_events=math.ceil(_RECOVERY_EXPECTED_BAD / threshold),
        note=note,
    )

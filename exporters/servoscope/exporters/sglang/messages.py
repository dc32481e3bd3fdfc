"""What the first rank adds to the requests that SGLang broadcasts to all ranks of a group.

Every rank takes these out of the list again before SGLang sees it. They travel as pickles, as all
requests do there: plain data only, and no import beyond this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KnobChange", "KnobHold"]


@dataclass(frozen=True, slots=True)
class KnobChange:
    """From this pass of the scheduler's loop on: these values, on every rank."""

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class KnobHold:
    """No new prompt is admitted in this one pass. Not sent: nothing is held (fails safe)."""

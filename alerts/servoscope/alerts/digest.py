"""A short name of a set of objectives: two parts that judge by the same ones have the same digest.

The collector answers its own at ``/api/v1/policy``; a sidecar that has another one judges requests
by other promises than the budgets are counted by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servoscope.alerts.objective import Objective

__all__ = ["digest"]


def digest(objectives: Iterable[Objective]) -> str:
    """16 hexadecimal digits: the same for the same promises in any order, whatever their origin.

    Descriptions do not count. Repeated objectives do.
    """
    lines = sorted(
        json.dumps(
            {
                "service": o.service,
                "name": o.name,
                "sli": str(o.sli),
                "threshold_seconds": o.threshold_seconds,
                "target_ratio": o.target_ratio,
                "window_seconds": o.window_seconds,
                "where": {label: sorted(values) for label, values in sorted(o.where.items())},
                "disconnects": str(o.disconnects),
            },
            sort_keys=True,
        )
        for o in objectives
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

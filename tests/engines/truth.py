"""The client's own truth, and what ours is compared with."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from engines.product import Product, fetch, wait_for
from servoscope.lab.client import Limits, run_closed
from servoscope.lab.plan import mixed_plan
from servoscope.lab.request import Observed

__all__ = ["TOKENS", "close", "plan", "records", "run"]

TOKENS = range(10, 2000)
TOLERANCE_RATIO, TOLERANCE_SECONDS = 0.10, 0.010


def plan(count: int, seed: int, **options: Any) -> Any:
    """Four request types with shared prefixes."""
    return mixed_plan(
        count, seed=seed, model="tiny", vocabulary=TOKENS, request_id_prefix=f"e2e{seed}", **options
    )


def run(url: str, requests: Any, concurrency: int = 4) -> list[Observed]:
    """Send them; the client's truth."""
    return asyncio.run(run_closed(url, requests, concurrency, limits=Limits(total_seconds=600)))


def close(ours: float, truth: float) -> bool:
    """Within 10 % or 10 ms, whichever is more."""
    return abs(ours - truth) <= max(TOLERANCE_RATIO * truth, TOLERANCE_SECONDS)


def records(product: Product, seed: int) -> list[dict[str, Any]]:
    """Records of one plan as the collector keeps them."""

    def read() -> list[dict[str, Any]]:
        url = f"{product.collector_url}/api/v1/records/recent?limit=500"
        rows = json.loads(fetch(url))["records"]
        return [r for r in rows if f"e2e{seed}-" in r["request_id"]]

    def settled() -> list[dict[str, Any]] | None:
        first = read()
        time.sleep(1.5)
        second = read()
        return second if second and len(first) == len(second) else None

    found: list[dict[str, Any]] = wait_for(settled, 30)
    return found

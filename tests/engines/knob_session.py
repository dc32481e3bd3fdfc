"""``servoscope knobs`` on a loaded engine: the load, its answers and the largest step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engines.product import Product
from servoscope.exporters.records import Outcome
from servoscope.lab.client import Limits, run_closed
from servoscope.lab.request import Observed, PlannedRequest

__all__ = ["SETTLE_SECONDS", "Loaded", "load", "long_prompts"]

#: About 2,300 tokens: each prompt alone is more than a full step of 2,048.
LONG = "import os, sys, json  # a long prompt to be cut into chunks\n" * 100
#: The sidecar reads each peak once, and more than once in this time: then what it shows is old no
#: more.
SETTLE_SECONDS = 2.5


def long_prompts(count: int, salt: str) -> list[PlannedRequest]:
    """The same plan for every salt, which keeps the KV caches of two runs apart."""
    return [
        PlannedRequest(
            request_id=f"{salt}-{number}",
            prompt=f"# file {number}\n{LONG}",
            max_tokens=24,
            extra_body={"cache_salt": salt},
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: its observations and the most tokens in one step of the engine."""

    seen: Sequence[Observed]
    step_tokens_max: float

    @property
    def digests(self) -> list[str | None]:
        """Digest of each answer's text, in plan order."""
        return [one.text_sha256 for one in self.seen]

    @property
    def failed(self) -> Mapping[str, str]:
        """Requests that did not end as they should, and why."""
        return {o.request_id: o.detail for o in self.seen if o.outcome is not Outcome.LENGTH}


def load(
    product: Product, plan: Sequence[PlannedRequest], during: Callable[[], None] | None = None
) -> Loaded:
    """Send ``plan``, six at once, and watch the sidecar's metrics; ``during``: beside the load.

    Watches SETTLE_SECONDS longer, so that all of this load is seen and none of it by the next one.
    """
    seen: list[Observed] = []

    def send() -> None:
        limits = Limits(total_seconds=300)
        seen.extend(asyncio.run(run_closed(product.engine_url, plan, 6, limits=limits)))

    def peak() -> float:
        return product.metrics().total("servoscope_step_tokens_max")

    largest = 0.0
    worker = threading.Thread(target=send)
    worker.start()
    try:
        if during is not None:
            during()
        while worker.is_alive():
            largest = max(largest, peak())
            time.sleep(0.2)
    finally:
        worker.join()
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        largest = max(largest, peak())
        time.sleep(0.2)
    return Loaded(seen, largest)

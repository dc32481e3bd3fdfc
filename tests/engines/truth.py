"""The client's own truth, and what ours is compared with."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.product import Product, fetch, wait_for
from servoscope.lab.client import Limits, run_closed
from servoscope.lab.plan import mixed_plan
from servoscope.lab.request import Observed

__all__ = [
    "TOKENS",
    "TOLERANCE_SECONDS",
    "Medians",
    "close",
    "plan",
    "records",
    "rounds_until_agreement",
    "run",
]

TOKENS = range(10, 2000)
#: Between both clocks lie the sending of the request and the way of its first chunk, on loopback.
TOLERANCE_RATIO, TOLERANCE_SECONDS = 0.10, 0.010


def plan(count: int, seed: int, **options: Any) -> Any:
    """Four request types with shared prefixes."""
    return mixed_plan(
        count, seed=seed, model="tiny", vocabulary=TOKENS, request_id_prefix=f"e2e{seed}", **options
    )


def run(url: str, requests: Any, concurrency: int = 8) -> list[Observed]:
    """Send them; the client's truth."""
    limits = Limits(total_seconds=600)
    # Connections are kept, as gateways and SDKs do: TTFT is a request's, not a TCP handshake's.
    return asyncio.run(run_closed(url, requests, concurrency, limits=limits, keep_alive=True))


def close(ours: float, truth: float) -> bool:
    """Within the tolerance."""
    return abs(ours - truth) <= max(TOLERANCE_RATIO * truth, TOLERANCE_SECONDS)


@dataclass(frozen=True, slots=True)
class Medians:
    """TTFT and TPOT p50 of one round, ours and the client's, in seconds."""

    ttft: float
    client_ttft: float
    tpot: float
    client_tpot: float
    #: Client's TTFT less ours, request by request: the tenth of them that waited least elsewhere.
    least_gap: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], seen: Sequence[Observed]) -> Medians:
        """Both sides of the same requests."""

        def middle(values: Iterable[float | None]) -> float:
            return statistics.median(v for v in values if v is not None)

        clients = {o.request_id: o.ttft_seconds for o in seen if o.ttft_seconds is not None}
        gaps = [
            clients[ident] - r["time_to_first_token_seconds"]
            for r in rows
            if (ident := _planned_id(r["request_id"])) in clients
        ]
        return cls(
            middle(r["time_to_first_token_seconds"] for r in rows),
            middle(o.ttft_seconds for o in seen),
            middle(r["time_per_output_token_seconds"] for r in rows),
            middle(o.tpot_seconds for o in seen),
            statistics.quantiles(gaps, n=10)[0],
        )

    def agree(self) -> bool:
        """Both within the tolerance: what is promised, and what a quiet machine shows."""
        return close(self.ttft, self.client_ttft) and close(self.tpot, self.client_tpot)

    def same_clocks(self) -> bool:
        """What holds on a busy machine too, and not with a clock that starts or stops elsewhere.

        There a request waits in the client and in the socket before any server can see it: that
        makes the medians differ by tens of ms at times (docs/benchmarks.md), not the requests that
        found both sides free. A clock that is 10 ms off is 10 ms off for these too.
        """
        return abs(self.least_gap) <= TOLERANCE_SECONDS and close(self.tpot, self.client_tpot)

    def __str__(self) -> str:
        """For a report."""
        return (
            f"TTFT p50 {self.ttft * 1e3:.1f} ms (client {self.client_ttft * 1e3:.1f}), "
            f"TPOT p50 {self.tpot * 1e3:.2f} ms (client {self.client_tpot * 1e3:.2f}), "
            f"TTFT gap p10 {self.least_gap * 1e3:.1f} ms"
            + ("" if self.agree() else ": MISSES 10 % or 10 ms")
        )


def _planned_id(ident: str) -> str:
    """What the client called it; vLLM puts ``cmpl-`` or ``chatcmpl-`` in front."""
    return "e2e" + ident.partition("e2e")[2]


def rounds_until_agreement(
    product: Product, first: Medians, seeds: Iterable[int], *, count: int = 80
) -> list[Medians]:
    """``first`` and, while they disagree, further rounds: noise passes, a wrong clock stays."""
    rounds = [first]
    for seed in seeds:
        if rounds[-1].agree():
            break
        seen = run(product.engine_url, plan(count, seed=seed))
        rounds.append(Medians.of(records(product, seed=seed), seen))
    return rounds


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

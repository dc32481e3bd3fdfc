"""The seam: what a sidecar's pusher sends is what the collector stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import aiohttp

from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.sidecar.publish.push import Pusher, http_post


async def test_a_pushers_records_arrive_once_each(serve: Callable[..., Any]) -> None:
    client = serve()
    now = time.time()
    async with aiohttp.ClientSession() as session:
        pusher = Pusher(
            http_post(session, client.url), sidecar_id="host:9790", epoch=5, batch_records=40
        )
        for number in range(100):
            pusher.offer(
                RequestRecord(
                    request_id=f"r{number}",
                    source=Source.TAP,
                    outcome=Outcome.COMPLETED,
                    engine="vllm",
                    server="127.0.0.1:8000",
                    request_type="rag",
                    finished_unix_seconds=now,
                    inter_token_seconds=(0.1, 0.2),
                    prompt_tokens=number,
                )
            )
        await pusher.flush()
    assert pusher.results == {"accepted": 100, "dropped": 0, "refused": 0}
    answer = client.get("/api/v1/overview").json
    (row,) = answer["rows"]
    assert (row["request_type"], row["requests"], row["prompt_tokens"]) == ("rag", 100, 4950)
    (sidecar,) = answer["sidecars"]
    assert (sidecar["sidecar_id"], sidecar["records"]) == ("host:9790", 100)

"""A real collector on a free port, and records to send to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from servoscope.alerts.spec import Objective, default_spec
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.exporters.records import Outcome, Phase, RequestRecord, Source
from servoscope.exporters.wire import encode_batch

NOW = 1_800_000_000.0


def make_record(number: int = 0, **changes: Any) -> RequestRecord:
    """A plausible finished request; ``number`` makes its id."""
    values: dict[str, Any] = {
        "request_id": f"req-{number}",
        "source": Source.PLUGIN,
        "outcome": Outcome.COMPLETED,
        "phase": Phase.DECODE,
        "finish_reason": "stop",
        "status_code": 200,
        "engine": "vllm",
        "server": "127.0.0.1:8000",
        "rank": 0,
        "model_name": "mid",
        "model_version": "abc123",
        "request_type": "chat",
        "streaming": True,
        "received_unix_seconds": NOW - 5,
        "first_token_unix_seconds": NOW - 4,
        "finished_unix_seconds": NOW - 1,
        "queue_seconds": 0.25,
        "prefill_seconds": 0.75,
        "decode_seconds": 3.0,
        "time_to_first_token_seconds": 1.0,
        "time_per_output_token_seconds": 0.0625,
        "e2e_seconds": 4.0,
        "prompt_tokens": 100,
        "output_tokens": 49,
        "cached_tokens": 25,
        "preemptions": 0,
    }
    return RequestRecord(**(values | changes))


def make_batch(
    records: Sequence[RequestRecord], seq: int = 0, *, sidecar_id: str = "side", epoch: int = 1
) -> dict[str, Any]:
    return encode_batch(records, sidecar_id=sidecar_id, epoch=epoch, seq=seq)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Client:
    """HTTP by the standard library: one connection a request, nothing shared with the server."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        try:
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            return Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(
        self,
        body: Any,
        content_type: str = "application/json",
        **headers: str,
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", "/api/v1/records", raw, {"content-type": content_type, **named})


class Running(Client):
    """``run_collector`` on a thread of this process."""

    def __init__(self, config: CollectorConfig, objectives: Sequence[Objective]) -> None:
        super().__init__("")
        self.config = config
        self._objectives = objectives
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "the collector did not come up"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task

        def ready(url: str) -> None:
            self.url = url
            self._ready.set()

        await run_collector(self.config, self._objectives, on_ready=ready)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(30)
        assert not self._thread.is_alive(), "the collector did not stop"


@pytest.fixture
def objectives() -> tuple[Objective, ...]:
    return tuple(default_spec().objectives)


@pytest.fixture
def serve(tmp_path: Path, objectives: tuple[Objective, ...]) -> Iterator[Callable[..., Running]]:
    """Start collectors on free ports; all are stopped at the end."""
    started: list[Running] = []

    def start(**changes: Any) -> Running:
        values: dict[str, Any] = {"port": 0, "database": tmp_path / "collector.duckdb"}
        running = Running(CollectorConfig(**(values | changes)), objectives)
        started.append(running)
        return running

    yield start
    for running in started:
        running.stop()

"""A whole sidecar on an engine that writes prompts into its file: nothing of them comes out.

Not on /metrics, not in inspect, in no log line, in no file of ours, in no push. A service that
looks like an SGLang stands in for the engine; file and spans carry a text nobody may find again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from engines.background import background
from exporters.otlp_bytes import captured_spans, encode
from servoscope.alerts.spec import default_spec
from servoscope.sidecar.api import inspection
from servoscope.sidecar.attach.target import attach
from servoscope.sidecar.config import SidecarConfig
from servoscope.sidecar.service import Sidecar

CANARY = "CANARY8472"
FILE = "sglang-request-metrics-20300101_00.log"
METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 9
# TYPE sglang:num_requests_total counter
sglang:num_requests_total 5
"""


def line(ident: str, at: float, **parameters: Any) -> str:
    told = {
        "request_parameters": json.dumps({
            "text": f"{CANARY} text", "input_ids": [f"{CANARY} ids"], "stream": True,
            "sampling_params": {"max_new_tokens": 9, "stop": f"{CANARY} stop"},
            "custom_labels": {"tenant": "acme", "other": CANARY}, **parameters,
        }),
        "id": ident, "finish_reason": {"type": "stop", "matched": f"{CANARY} matched"},
        "prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 2, "e2e_latency": 0.5,
        "request_received_ts": at - 0.5, "request_finished_ts": at, "queue_time": CANARY,
        "output_token_logprobs": [[-0.1, 5, f"{CANARY} token"]], "decode_throughput": 100.0,
    }  # fmt: skip
    return json.dumps(told)


class Engine:
    """Answers as an SGLang; ``writes_text`` as its flags say."""

    def __init__(self, directory: Path, *, writes_text: bool) -> None:
        self.directory = directory
        self.pushed: list[bytes] = []
        self.url = ""
        self._info = {
            "version": "0.5.23", "enable_metrics": True, "export_metrics_to_file": True,
            "export_metrics_to_file_dir": str(directory), "log_requests": not writes_text,
            "log_requests_level": 0, "enable_trace": True,
        }  # fmt: skip

    def write(self, *lines: str) -> None:
        with (self.directory / FILE).open("a") as file:
            file.writelines(f"{one}\n" for one in lines)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text=METRICS)
        return web.json_response(self._answers[request.path])

    async def _push(self, request: web.Request) -> web.Response:
        self.pushed.append(await request.read())
        return web.json_response({"accepted": 1})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Engine]:
        app = web.Application()
        self._answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]},
            "/server_info": self._info,
            "/v1/loads": {"timestamp": "2026-11-29T12:00:00+00:00", "loads": [
                {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}
            ]},
        }  # fmt: skip
        for path in (*self._answers, "/metrics"):
            app.router.add_get(path, self._answer)
        app.router.add_post("/api/v1/records", self._push)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield self
        finally:
            await runner.cleanup()


class Running:
    def __init__(self, sidecar: Sidecar, session: aiohttp.ClientSession) -> None:
        self.sidecar = sidecar
        self._session = session

    async def text(self, path: str) -> str:
        async with self._session.get(f"http://127.0.0.1:{self.sidecar.port}{path}") as answer:
            return await answer.text()

    async def total(self, name: str, **labels: str) -> float:
        return sum(
            s.value
            for family in text_string_to_metric_families(await self.text("/metrics"))
            for s in family.samples
            if s.name == f"servoscope_{name}" and labels.items() <= s.labels.items()
        )

    async def until(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(20):
            while await self.total(name, **labels) < value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def send_spans(self) -> None:
        spans = captured_spans()
        for span in spans:
            span["attrs"] |= {"gen_ai.prompt": CANARY, "message": CANARY}
        host, port = self.sidecar.config.otlp_address()
        headers = {"Content-Type": "application/x-protobuf"}
        url = f"http://{host}:{port}/v1/traces"
        async with self._session.post(url, data=encode(spans), headers=headers) as answer:
            assert answer.status == 200


@asynccontextmanager
async def running(engine: Engine, otlp_port: int, **settings: Any) -> AsyncIterator[Running]:
    config = SidecarConfig(
        port=0, scrape_interval_seconds=0.05, scrape_max_interval_seconds=0.2, tap="off",
        watch_interval_seconds=0.05, collector_url=engine.url, push_interval_seconds=0.05,
        warmup_seconds=0.0, loads_interval_seconds=0.05, otlp=f"127.0.0.1:{otlp_port}", **settings,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        target = await attach(engine.url)
        sidecar = Sidecar(target, config, default_spec().objectives, session)
        task = await stack.enter_async_context(background(sidecar.run()))
        async with asyncio.timeout(20):
            while sidecar.port == 0 or sidecar.report.not_ready():
                if task.done():
                    task.result()
                await asyncio.sleep(0.01)
        yield Running(sidecar, session)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "requests"
    made.mkdir()
    return made


def files_below(*places: Path) -> bytes:
    found = [path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()]
    assert found
    return b"\n".join(found)


async def test_nothing_that_somebody_wrote_comes_out(
    directory: Path,
    places: tuple[Path, Path],
    unused_tcp_port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    places[1].mkdir(mode=0o700)
    async with (
        Engine(directory, writes_text=True).serving() as engine,
        running(engine, unused_tcp_port, sglang_allow_prompt_text=True) as sidecar,
    ):
        now = sidecar.sidecar.clock()
        engine.write(line("a", now), f'garbage {{"text": "{CANARY}"}}', f'{{"id": "{CANARY}"')
        engine.write(line("b", now, lora_path=None), json.dumps({"request_parameters": CANARY}))
        await sidecar.until("requests_total", 2, source="file", outcome="completed")
        await sidecar.send_spans()
        await sidecar.until("source_dropped_total", 2, source="file", reason="garbage_line")
        async with asyncio.timeout(20):
            while not any(b'"b"' in body for body in engine.pushed):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        told = json.loads(await sidecar.text("/api/v1/inspect"))
        shown = [await sidecar.text("/metrics"), json.dumps(told), caplog.text]
        assert told["requests_from"] == "file"
        assert [s["source"] for s in told["sources"]] == [
            "file", "tap", "relay", "otlp", "scrape", "loads",
        ]  # fmt: skip
        assert await sidecar.total("prompt_tokens_sum") == 14
        assert await sidecar.total("requests_total", source="otlp") == 0  # one source in force
        refused = await sidecar.total("source_dropped_total", reason="refused_value")
        assert refused == 2  # queue_time
        assert await sidecar.total("running") == 3  # from the load report, not from /metrics
        assert await sidecar.total("source_up", source="loads") == 1
        kept = files_below(*places)
    pushed = b"\n".join(engine.pushed)
    assert b"acme" in pushed
    assert CANARY not in "".join(shown) + caplog.text
    assert CANARY.encode() not in pushed + kept + files_below(*places)


async def test_a_file_with_prompts_is_refused_and_spans_take_over(
    directory: Path, places: tuple[Path, Path], unused_tcp_port: int
) -> None:
    places[1].mkdir(mode=0o700)
    async with (
        Engine(directory, writes_text=True).serving() as engine,
        running(engine, unused_tcp_port) as sidecar,
    ):
        engine.write(line("a", sidecar.sidecar.clock()))
        told = json.loads(await sidecar.text("/api/v1/inspect"))
        assert told["requests_from"] == "scrape"
        sources = {s["source"]: s for s in told["sources"]}
        assert sources["file"]["state"] == "failed"
        assert "--log-requests --log-requests-level 0" in sources["file"]["detail"]
        await sidecar.send_spans()  # of long ago: counted by the scrape then
        async with asyncio.timeout(20):
            while told["requests_from"] != "otlp":
                await asyncio.sleep(0.02)
                told = json.loads(await sidecar.text("/api/v1/inspect"))
        assert await sidecar.total("requests_total", source="file") == 0


async def test_inspect_without_a_sidecar_says_the_same(directory: Path, places: Any) -> None:
    del places
    async with Engine(directory, writes_text=False).serving() as engine:
        told = await inspection.inspect_url(engine.url, SidecarConfig())
        sources = {s["source"]: s for s in told["sources"]}
        assert list(sources) == ["file", "tap", "relay", "otlp", "scrape"]
        assert sources["file"]["state"] == "idle"
        assert str(directory) in sources["file"]["detail"]
        assert told["version"] == "0.5.23"
        off = await inspection.inspect_url(engine.url, SidecarConfig(request_file=False))
        assert "off in the settings" in off["sources"][0]["detail"]

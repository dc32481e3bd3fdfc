"""A whole sidecar against an engine process that can be killed, and a plug-in's socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.background import background
from servoscope.alerts.spec import default_spec
from servoscope.collector.app import run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.sidecar.api import inspection
from servoscope.sidecar.api.server import AlreadyAttachedError
from servoscope.sidecar.attach.target import AttachError, attach
from servoscope.sidecar.config import ControlConfig, SidecarConfig
from servoscope.sidecar.service import Sidecar, run_sidecar
from servoscope.sidecar.sources.scrape_loop import ScrapeLoop

#: A vLLM in a process of its own: /metrics counts up by itself; with ``plugin`` it has the stats
#: socket too and sends a record for every line on stdin.
ENGINE = """
import http.server, json, os, socket, sys, threading, time
port, run_dir, plugin = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "plugin"
start, done = time.time(), [0]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        at = 'engine="0",model_name="tiny"'
        body = {"/version": json.dumps({"version": "0.32.0"}),
            "/v1/models": json.dumps({"data": [{"id": "tiny", "owned_by": "vllm"}]}),
            "/metrics": "vllm:num_requests_running{%s} 1\\nvllm:generation_tokens_total{%s} %d\\n"
                'vllm:request_success_total{%s,finished_reason="stop"} %d\\n'
                % (at, at, 1000 * (time.time() - start), at, done[0])}.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body or "")))
        self.end_headers()
        self.wfile.write((body or "").encode())
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
peers = []
if plugin:
    path = os.path.join(run_dir, "stats-%d.sock" % os.getpid())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    def serve():
        while True:
            peer, _ = listener.accept()
            peer.sendall(json.dumps({"type": "hello", "protocol": 1, "version": "0", "engine":
                "vllm", "engine_version": "0.32.0", "boot_id": str(os.getpid()), "pid": os.getpid(),
                "model_names": ["tiny"]}).encode() + b"\\n")
            peers.append(peer)
    threading.Thread(target=serve, daemon=True).start()
print(server.server_address[1], flush=True)
seq = 0
for line in sys.stdin:
    if line.strip() == "count":
        done[0] += 1
        continue
    seq += 1
    done[0] += 1
    now = time.time()
    record = {"type": "record", "seq": seq, "dropped": 0, "outcome": "completed", "phase": "decode",
        "request_id": "r%d-%d" % (os.getpid(), seq), "received_unix_seconds": now - 1,
        "finished_unix_seconds": now, "e2e_seconds": 1.0, "time_to_first_token_seconds": 0.25,
        "prompt_tokens": 10, "output_tokens": 5, "time_per_output_token_seconds": 0.01}
    while not peers: time.sleep(0.01)
    peers[-1].sendall(json.dumps(record).encode() + b"\\n")
"""


class EngineProcess:
    """Start, feed, kill."""

    def __init__(self, run_dir: Path, port: int = 0, plugin: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(port), str(run_dir), "plugin" if plugin else "bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, line: str, times: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n" * times)
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


async def text_of(session: aiohttp.ClientSession, url: str) -> str:
    """One answer."""
    async with session.get(url) as answer:
        return await answer.text()


class Running:
    """A sidecar at work."""

    def __init__(
        self,
        sidecar: Sidecar,
        session: aiohttp.ClientSession,
        said: list[str],
        task: asyncio.Task[None],
    ) -> None:
        self._task = task
        self.sidecar = sidecar
        self.said = said
        self.session = session

    async def end(self) -> None:
        """As SIGTERM does."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def text(self, path: str = "/metrics") -> str:
        return await text_of(self.session, f"http://127.0.0.1:{self.sidecar.port}{path}")

    async def total(self, name: str, **labels: str) -> float:
        found = 0.0
        for family in text_string_to_metric_families(await self.text()):
            for s in family.samples:
                if s.name == f"servoscope_{name}" and labels.items() <= s.labels.items():
                    found += s.value
        return found

    async def until(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(20):
            while await self.total(name, **labels) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


CONFIG = SidecarConfig(
    port=0, scrape_interval_seconds=0.05, scrape_max_interval_seconds=0.2, tap="off",
    watch_interval_seconds=0.05, collector_url="", warmup_seconds=0.0,
)  # fmt: skip
Start = Callable[..., Any]


@pytest.fixture
async def start(places: tuple[Path, Path]) -> AsyncIterator[Start]:
    places[1].mkdir(mode=0o700)
    async with contextlib.AsyncExitStack() as stack:

        async def begin(url: str, config: SidecarConfig = CONFIG) -> Running:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            said: list[str] = []
            target = await attach(url)
            sidecar = Sidecar(target, config, default_spec().objectives, session, say=said.append)
            task = await stack.enter_async_context(background(sidecar.run()))
            running = Running(sidecar, session, said, task)
            async with asyncio.timeout(20):
                while sidecar.port == 0 or sidecar.report.not_ready():
                    if task.done():
                        task.result()
                    await asyncio.sleep(0.01)
            return running

        yield begin


@pytest.fixture
def processes() -> Any:
    made: list[EngineProcess] = []
    yield made
    for engine in made:
        engine.kill()


async def test_without_any_source_of_requests_the_engines_own_counts_stand_in(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path]
) -> None:
    engine = EngineProcess(places[1])
    processes.append(engine)
    engine.say("count", 5)  # before attach: not ours
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while (  # noqa: ASYNC110 - the other process's state
            'finished_reason="stop"} 5' not in await text_of(session, f"{engine.url}/metrics")
        ):
            await asyncio.sleep(0.01)
    running = await start(engine.url)  # which returns when the engine was read
    engine.say("count", 3)
    await running.until("requests_total", 3, source="scrape", outcome="completed")
    assert await running.total("reconcile_requests_total", side="engine") == 3
    body = json.loads(await running.text("/api/v1/inspect"))
    assert body["requests_from"] == "scrape"
    assert "SLI counters" in body["absent"][0]
    assert "servoscope_slo_total" not in await running.text()
    details = {s["source"]: s["detail"] for s in body["sources"]}
    assert "pip install --no-deps PATH" in details["plugin"]
    assert body["relay"] is None
    attached, missing = running.said
    assert attached.splitlines()[:2] == [
        f"attached to vllm 0.32.0 (model tiny) at {engine.url}",
        f"metrics at http://127.0.0.1:{running.sidecar.port}/metrics",
    ]
    assert attached.splitlines()[2].startswith("requests seen by: scrape")
    assert missing == f"not by plugin: {details['plugin']}"


async def test_engine_killed_and_started_again_with_the_plug_in(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path]
) -> None:
    """No counter falls, one restart is counted, the better source takes over, nothing twice."""
    bare = EngineProcess(places[1])
    processes.append(bare)
    running = await start(bare.url)
    await running.until("source_up", 1, source="scrape")
    async with asyncio.timeout(20):
        while (before := await running.total("engine_generated_tokens_total")) < 300:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    bare.kill()
    processes.clear()
    await running.until("engine_up", 0)
    await running.until("source_up", 0, source="scrape")
    fresh = EngineProcess(places[1], port=bare.port, plugin=True)
    processes.append(fresh)
    await running.until("engine_restarts_total", 1)
    await running.until("engine_up", 1)
    assert await running.total("engine_generated_tokens_total") >= before
    fresh.say("record", 4)  # maybe before the sidecar has found the socket
    await running.until("requests_total", 4)
    async with asyncio.timeout(20):
        while not in_force(running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    fresh.say("record", 5)
    await running.until("requests_total", 9)
    assert await running.total("requests_total", source="plugin") >= 5
    assert running.said[-1] == "requests seen by: plugin"
    assert await running.total("slo_total", objective="errors") >= 5
    assert json.loads(await running.text("/api/v1/inspect"))["requests_from"] == "plugin"
    assert await running.total("engine_restarts_total") == 1


def in_force(running: Running) -> bool:
    """The plug-in of the second engine is in force."""
    return running.sidecar.selection.in_force is running.sidecar.plugin


def private_text(path: Path) -> str:
    """What a file says that only its user may read."""
    assert path.stat().st_mode & 0o077 == 0
    return path.read_text().strip()


async def test_registered_while_it_runs_and_gone_afterwards(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path]
) -> None:
    engine = EngineProcess(places[1], plugin=True)
    processes.append(engine)
    running = await start(engine.url)
    (entry,) = (places[1] / "sidecars").glob("*.json")
    found = json.loads(entry.read_text())
    assert found["server"] == f"127.0.0.1:{engine.port}"
    assert found["port"] == running.sidecar.port
    headers = {"Authorization": f"Bearer {private_text(Path(found['token_path']))}"}
    url = f"{found['url']}/api/v1/knobs"
    async with running.session.post(url, json={"set": {"chunk_tokens": 1}}, headers=headers) as r:
        assert r.status == 404
        assert "SERVOSCOPE_KNOBS=1" in (await r.json())["error"]


async def test_a_second_sidecar_is_refused_however_the_engine_is_addressed(
    start: Start, engine: Any, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.stop()
    await engine.start(host="::")
    await start(f"http://[::1]:{engine.port}")
    (entry,) = (places[1] / "sidecars").glob("*.json")
    assert entry.name == f"127.0.0.1:{engine.port}.json"
    # The same process may register again; another one would be refused: as in its place.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for host in ("127.0.0.1", "localhost", "[::1]", "127.0.0.2"):
        with pytest.raises(AlreadyAttachedError, match="has a sidecar already"):
            await run_sidecar(f"http://{host}:{engine.port}", CONFIG, ())


async def test_with_a_collector_records_are_kept_until_it_has_them_and_its_policy_is_heard(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = EngineProcess(places[1], plugin=True)
    processes.append(engine)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    other = default_spec().objectives[:1]
    collector = CollectorConfig(port=0, database=tmp_path / "c.duckdb", threads=1)
    async with background(run_collector(collector, other, on_ready=url.set_result)):
        config = replace(
            CONFIG, collector_url=await asyncio.wait_for(url, 20), push_interval_seconds=0.05,
            control=ControlConfig(obey_policy=True),
        )  # fmt: skip
        running = await start(engine.url, config)
        await running.until("spool_up", 1)
        await running.until("policy_up", 1)
        engine.say("record", 5)
        await running.until("pushed_records_total", 5, result="accepted")
        await running.until("spool_bytes", 0)
        assert await running.total("spool_records_total", result="written") == 5
        assert await running.total("policy_control_mode", mode="observe") == 1
        assert await running.total("policy_slo_mismatch") == 1
        policy = json.loads(await running.text("/api/v1/inspect"))["policy"]
        assert policy["slo_mismatch"] is True
        assert "other objectives" in policy["detail"]
        (entry,) = (places[1] / "sidecars").glob("*.json")
        word = private_text(Path(json.loads(entry.read_text())["token_path"]))
        async with running.session.post(
            f"http://127.0.0.1:{running.sidecar.port}/api/v1/knobs",
            json={"set": {"chunk_tokens": 64}}, headers={"Authorization": f"Bearer {word}"},
        ) as answer:  # fmt: skip
            assert answer.status == 409
            assert "'observe'" in (await answer.json())["error"]


async def test_what_could_not_be_sent_at_the_end_is_sent_by_the_next_sidecar(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path], tmp_path: Path,
    unused_tcp_port: int,
) -> None:  # fmt: skip
    engine = EngineProcess(places[1], plugin=True)
    processes.append(engine)
    config = replace(
        CONFIG, collector_url=f"http://127.0.0.1:{unused_tcp_port}", push_interval_seconds=0.05
    )
    running = await start(engine.url, config)
    engine.say("record", 7)
    await running.until("requests_total", 7)
    await running.end()
    (file,) = (places[0] / "spool").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (f"127.0.0.1:{engine.port}.spool", 0o600)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    collector = CollectorConfig(port=unused_tcp_port, database=tmp_path / "c.duckdb", threads=1)
    objectives = default_spec().objectives
    async with background(run_collector(collector, objectives, on_ready=url.set_result)):
        await asyncio.wait_for(url, 20)
        again = await start(engine.url, config)
        await again.until("pushed_records_total", 7, result="accepted")
        assert await again.total("spool_records_total", result="restored") == 7
        await again.until("spool_bytes", 0)


async def test_every_line_is_in_the_catalogue(
    start: Start, processes: list[EngineProcess], places: tuple[Path, Path]
) -> None:
    engine = EngineProcess(places[1], plugin=True)
    processes.append(engine)
    running = await start(engine.url)
    engine.say("record")
    await running.until("requests_total", 1)
    families = list(text_string_to_metric_families(await running.text()))
    assert len({f.name for f in families}) == len(families)
    ours = [f for f in families if f.name.startswith("servoscope_")]
    assert len(ours) > 30


async def test_run_sidecar_says_when_there_is_nothing(unused_tcp_port: int) -> None:
    with pytest.raises(AttachError):
        await run_sidecar(f"http://127.0.0.1:{unused_tcp_port}", CONFIG, ())


async def test_a_fault_of_ours_ends_it_loudly(
    engine: Any, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_self: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(ScrapeLoop, "run", broken)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await run_sidecar(engine.url, CONFIG, ())
    assert not list((places[1] / "sidecars").glob("*.json"))


@pytest.mark.parametrize("mode", ["good", "500", "garbage", "nan"])
async def test_inspect_without_a_sidecar(engine: Any, places: tuple[Path, Path], mode: str) -> None:
    engine.mode = mode
    body = await inspection.inspect_url(engine.url, CONFIG)
    json.dumps(body)
    assert (body["engine"], body["model_name"]) == ("vllm", "tiny")
    assert body["requests_from"] is None
    assert [s["source"] for s in body["sources"]] == ["plugin", "tap", "relay", "scrape"]
    states = {"good": "idle", "500": "failed", "garbage": "bad_value", "nan": "bad_value"}
    assert body["sources"][3]["state"] == states[mode]
    assert {k["name"]: k["mode"] for k in body["knobs"]}["chunk_tokens"] == "restart"
    assert "SERVOSCOPE_KNOBS=1" in body["knobs_why"]


async def test_a_kind_that_the_server_is_not_is_not_believed(
    engine: Any, places: tuple[Path, Path]
) -> None:
    assert (await inspection.inspect_url(engine.url, CONFIG, engine="vllm"))["engine"] == "vllm"
    with pytest.raises(AttachError, match=r"not answer like llamacpp .*like vllm"):
        await inspection.inspect_url(engine.url, CONFIG, engine="llamacpp")
    engine.mode = "501"  # without metrics its own word is enough
    assert (await inspection.inspect_url(engine.url, CONFIG, engine="vllm"))["engine"] == "vllm"
    engine.paths = {"/version": None, "/v1/models": None}
    with pytest.raises(AttachError, match="not answer like vllm"):
        await inspection.inspect_url(engine.url, CONFIG, engine="vllm")

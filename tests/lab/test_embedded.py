"""The embedded engine: the real llama.cpp server, started, loaded and ended for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.background import background
from servoscope.exporters.records import Outcome
from servoscope.lab.client import CHAT, PlannedRequest, run_closed, run_open
from servoscope.lab.embedded.server import EmbeddedEngine, EngineStartError
from servoscope.lab.plan import mixed_plan
from servoscope.lab.replay import Scale, plan_pass, replay
from servoscope.lab.sample import load_sample

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(folder) as running:
        yield running


def get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return str(response.read().decode())


def counters(engine: EmbeddedEngine) -> dict[str, float]:
    lines = get(f"{engine.url}/metrics").splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def common(one: str, other: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return stat.rsplit(")", 1)[1].split()[0] == "Z"  # a zombie has ended


def test_what_it_is(engine: EmbeddedEngine) -> None:
    assert engine.alive
    assert engine.url == f"http://127.0.0.1:{engine.port}"
    assert engine.version
    models = json.loads(get(f"{engine.url}/v1/models"))
    assert [m["id"] for m in models["data"]] == ["embedded-tiny"]
    assert len(json.loads(get(f"{engine.url}/slots"))) == 4
    assert "llamacpp:prompt_tokens_total" in counters(engine)


def test_it_listens_on_loopback_only(engine: EmbeddedEngine) -> None:
    table = Path("/proc/net/tcp").read_text(encoding="ascii")
    rows = [line.split() for line in table.splitlines()[1:]]
    listening = [r[1] for r in rows if r[3] == "0A" and r[1].endswith(f":{engine.port:04X}")]
    assert listening == [f"0100007F:{engine.port:04X}"]


async def test_client_and_engine_agree_on_every_token(engine: EmbeddedEngine) -> None:
    before = counters(engine)
    plan = mixed_plan(24, seed=11, streaming_share=0.8)
    seen = await run_closed(engine.url, plan, 4)
    after = counters(engine)
    assert Counter(s.outcome for s in seen) == {Outcome.LENGTH: 24}
    for planned, one in zip(plan, seen, strict=True):
        assert one.output_tokens == planned.max_tokens
        template = 0 if planned.endpoint != CHAT else len("<|user|>\n<|assistant|>")
        assert one.prompt_tokens == len(planned.prompt) + template
        assert one.e2e_seconds is not None
        if planned.streaming:
            # The trap this model keeps alive: events are not tokens.
            assert 1 <= one.token_events <= planned.max_tokens
            assert one.ttft_seconds is not None
            assert one.tpot_seconds is not None
            assert 0 < one.ttft_seconds < one.e2e_seconds
            rest = one.tpot_seconds * (planned.max_tokens - 1)
            assert one.ttft_seconds + rest <= one.e2e_seconds + 1e-6
        else:
            assert one.ttft_seconds is None
    assert sum(s.token_events for s in seen) < sum(s.output_tokens or 0 for s in seen)

    def grown(name: str) -> float:
        return after[f"llamacpp:{name}"] - before[f"llamacpp:{name}"]

    cached = sum(s.cached_tokens or 0 for s in seen)
    assert cached > 0
    assert grown("prompt_tokens_cached_total") == cached
    assert grown("prompt_tokens_total") == sum(s.prompt_tokens or 0 for s in seen) - cached
    assert grown("tokens_predicted_total") == sum(s.output_tokens or 0 for s in seen)


async def test_a_shared_prefix_is_cached_and_answers_do_not_change(engine: EmbeddedEngine) -> None:
    prompt = "every good prefix deserves a second reading " * 20
    plan = [PlannedRequest(request_id=f"p{n}", prompt=prompt, max_tokens=24) for n in range(2)]
    first, second = await run_closed(engine.url, plan, 1)
    assert first.cached_tokens is not None
    assert second.cached_tokens is not None
    assert first.cached_tokens < 100
    assert second.cached_tokens >= len(prompt) - 1
    assert first.text_sha256 == second.text_sha256


async def test_what_a_trace_shares_is_what_the_engine_caches(folder: Path) -> None:
    """In turn and with room for all, the cached tokens are the longest prefix seen before."""
    shared = [r for r in load_sample() if len(r.prefix or ()) > 8][:60]
    plan = plan_pass(shared, Scale(output=1 / 64, spread_seconds=0.0), abort_share=0.0)
    with EmbeddedEngine(folder) as fresh:
        seen = await run_closed(fresh.url, plan, 1)
    before: list[str] = []
    deep = 0
    for planned, one in zip(plan, seen, strict=True):
        prompt = f"<|user|>{planned.prompt}"
        longest = max((common(prompt, earlier) for earlier in before), default=0)
        before.append(prompt)
        assert one.cached_tokens is not None
        assert one.cached_tokens <= longest
        if longest > 0.2 * len(prompt):  # below a tenth llama.cpp takes any free slot
            deep += 1
            assert one.cached_tokens >= longest - 16  # a block; letters may agree by chance
    assert deep >= 5


async def test_four_streams_run_at_once(engine: EmbeddedEngine) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            slots = json.loads(await asyncio.to_thread(get, f"{engine.url}/slots"))
            most = max(most, sum(slot["is_processing"] for slot in slots))

    plan = [
        PlannedRequest(request_id=f"s{n}", prompt=f"{n} stream", max_tokens=400) for n in range(4)
    ]
    async with background(watch()):
        seen = await run_closed(engine.url, plan, 4)
    assert most == 4
    assert {s.output_tokens for s in seen} == {400}


async def test_a_client_that_leaves_frees_its_slot(engine: EmbeddedEngine) -> None:
    plan = [
        PlannedRequest(
            request_id="gone", prompt="x" * 50, max_tokens=1500, abort_after_token_events=3
        )
    ]
    seen = (await run_closed(engine.url, plan, 1))[0]
    assert seen.outcome is Outcome.CLIENT_DISCONNECT

    def idle() -> bool:
        slots = json.loads(get(f"{engine.url}/slots"))
        return not any(slot["is_processing"] for slot in slots)

    assert until(idle)


async def test_the_sample_runs_on_it(engine: EmbeddedEngine) -> None:
    plan = [p for p in plan_pass(load_sample(), Scale(arrival=0.5)) if p.arrival_seconds < 6]
    seen = await run_open(engine.url, plan)
    ended = Counter(s.outcome for s in seen)
    assert set(ended) <= {Outcome.LENGTH, Outcome.CLIENT_DISCONNECT}
    assert {s.request_type for s in seen} == {"chat", "summarise", "generate", "rag"}
    assert sum(s.cached_tokens or 0 for s in seen) > 0
    progress = await replay(engine.url, load_sample()[:3], Scale(spread_seconds=0.0), passes=1)
    assert progress.outcomes["length"] >= 2


def test_it_ends_when_told_with_a_stream_open(folder: Path) -> None:
    engine = EmbeddedEngine(folder).start()
    pid = engine.pid
    with socket.create_connection(("127.0.0.1", engine.port), timeout=10) as open_stream:
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        open_stream.sendall((head + body).encode())
        assert open_stream.recv(100).startswith(b"HTTP/1.1 200")
        assert engine.stop() == 0
    assert gone(pid)
    assert not engine.alive
    assert engine.stop() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "servoscope.lab.embedded.server", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
        process.send_signal(number)
        assert process.wait(timeout=20) == 0


def test_it_ends_when_its_parent_is_killed(folder: Path) -> None:
    parent = (
        "import sys, time; from pathlib import Path\n"
        "from servoscope.lab.embedded.server import EmbeddedEngine\n"
        f"engine = EmbeddedEngine(Path({str(folder)!r})).start()\n"
        "print(engine.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid)
        process.kill()
        process.wait(timeout=20)
    assert until(lambda: gone(pid))


def test_a_start_that_fails_says_why(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    engine = EmbeddedEngine(folder, model=broken)
    with pytest.raises(EngineStartError, match="ended at its start") as caught:
        engine.start()
    assert "broken.gguf" in str(caught.value)
    assert not engine.alive
    slow = EmbeddedEngine(folder, ready_seconds=0.0)
    with pytest.raises(EngineStartError, match="was not ready in 0 s"):
        slow.start()
    assert not slow.alive


def test_without_the_package_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(EngineStartError, match=r"servoscope\[lab\]"):
        EmbeddedEngine(folder).start()

"""What a sidecar costs while its engine serves 50 requests a second: CPU of one core, and memory.

    python benchmarks/sidecar_cost.py [--rate 50] [--seconds 30]

The sidecar is a process of its own, started as a user starts it. This process plays the engine: a
listening port with a real vLLM's /metrics text, read every 5 s, and the plug-in's own stats socket,
through which finished requests come (128 inter-token gaps each, four types, acknowledged); it
reads the sidecar's /metrics every 5 s as Prometheus would, and takes the pushed batches. CPU is
user + system of the sidecar's process (/proc), over the whole interval.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.plugin.record_buffer import RecordBuffer
from servoscope.exporters.vllm.lifecycle import Lifecycle
from servoscope.exporters.vllm.stats_feed import StatsHandler

ROOT = Path(__file__).resolve().parents[1]
METRICS = ROOT / "tests/fixtures/engines/vllm/0.32.0/metrics_under_load.txt"
GAPS = 128


class Engine(http.server.BaseHTTPRequestHandler):
    """What the sidecar asks a vLLM for, and the collector's door."""

    text = METRICS.read_bytes()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer a read."""
        answers = {
            "/version": b'{"version": "0.32.0"}',
            "/v1/models": b'{"data": [{"id": "tiny", "owned_by": "vllm"}]}',
            "/metrics": self.text,
        }
        self._send(answers.get(self.path, b"{}"))

    def do_POST(self) -> None:
        """Take a batch of records."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"{}")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Life(Lifecycle):
    """The plug-in's own, with sixteen open requests that never end."""

    def __len__(self) -> int:
        return 16

    def snapshot(self) -> tuple[list[dict[str, Any]], int]:
        """Sixteen open requests."""
        now = time.time()
        one = {"phase": "decode", "prompt_tokens": 100, "received_unix_seconds": now, "lora": None}
        return [{"request_id": f"open-{i}", **one} for i in range(16)], 16


class Hooks:
    """Nothing wrong."""

    faults = 0
    off = ""
    bypass = False


def hello() -> dict[str, Any]:
    """First line of the stats socket."""
    return {
        "type": "hello", "protocol": 1, "version": "0.1.0", "engine": "vllm",
        "engine_version": "0.32.0", "boot_id": "bench", "boot_values": {}, "pid": os.getpid(),
        "rank": None, "model_names": ["tiny"], "missing": [], "off": "",
    }  # fmt: skip


def message(number: int, rng: random.Random) -> dict[str, Any]:
    """One finished request as the plug-in tells it."""
    now = time.time()
    gaps = [rng.lognormvariate(-4, 0.5) for _ in range(GAPS)]
    ttft = rng.lognormvariate(-1, 0.7)
    prompt, output = rng.choice([(100, 129), (3000, 129), (100, 600), (3000, 600)])
    return {
        "type": "record", "request_id": f"cmpl-{number}", "outcome": "completed",
        "phase": "decode", "finish_reason": "stop", "endpoint": "/v1/completions",
        "streaming": True, "received_unix_seconds": now - ttft - sum(gaps),
        "first_token_unix_seconds": now - sum(gaps), "finished_unix_seconds": now,
        "queue_seconds": ttft / 4, "prefill_seconds": ttft * 3 / 4, "decode_seconds": sum(gaps),
        "time_to_first_token_seconds": ttft,
        "time_per_output_token_seconds": statistics.fmean(gaps),
        "e2e_seconds": ttft + sum(gaps), "prompt_tokens": prompt, "output_tokens": output,
        "cached_tokens": 64, "max_output_tokens": 1024, "preemptions": 0,
        "inter_token_seconds": gaps,
    }  # fmt: skip


def total(url: str, name: str) -> float:
    """Sum of a counter on the sidecar's /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def measure(
    sidecar: psutil.Process, url: str, buffer: RecordBuffer, rate: float, seconds: float
) -> tuple[float, float]:
    """(percent of a core, MiB resident at the end) while ``rate`` requests a second finish."""
    rng = random.Random(1)
    before = sidecar.cpu_times()
    start = time.monotonic()
    sent, next_read = 0, start + 5
    while (now := time.monotonic()) < start + seconds:
        while sent < (now - start) * rate:
            sent += 1
            buffer.put(message(sent, rng))
        if now >= next_read:
            total(url, "servoscope_requests_total")
            next_read += 5
        time.sleep(0.01)
    spent = sidecar.cpu_times()
    used = spent.user + spent.system - before.user - before.system
    return 100 * used / (time.monotonic() - start), sidecar.memory_info().rss / 2**20


def start_sidecar(home: Path, engine_url: str) -> tuple[subprocess.Popen[bytes], str]:
    """The process and the address of its /metrics, once it is ready."""
    words = ["sidecar", engine_url, "--collector", engine_url, "--tap", "off"]
    process = subprocess.Popen(
        [sys.executable, "-m", "servoscope.cli.main", *words, "--warmup-seconds", "0"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in (home / "run" / "sidecars").glob("*.json"):
            url: str = json.loads(path.read_text())["url"]
            try:
                urllib.request.urlopen(f"{url}/readyz", timeout=2).close()
            except OSError:
                continue
            return process, url
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the sidecar did not get ready within 60 s")


def main() -> int:
    """Measure idle and loaded; print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=50.0, help="finished requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        os.environ["SERVOSCOPE_STATE"] = str(home / "state")
        os.environ["SERVOSCOPE_RUN_DIR"] = str(home / "run")
        engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        buffer = RecordBuffer()
        life = Life(lambda _: None)
        handler = StatsHandler(buffer, life, Hooks(), hello)  # type: ignore[arg-type]
        feed = LineServer(home / "run" / f"stats-{os.getpid()}.sock", handler)
        feed.start()
        engine_url = f"http://127.0.0.1:{engine.server_address[1]}"
        process, url = start_sidecar(home, engine_url)
        try:
            sidecar = psutil.Process(process.pid)
            idle = measure(sidecar, url, buffer, 0, options.seconds / 3)
            before = total(url, "servoscope_requests_total")
            loaded = measure(sidecar, url, buffer, options.rate, options.seconds)
            time.sleep(1.0)
            counted = total(url, "servoscope_requests_total") - before
        finally:
            process.terminate()
            process.wait(timeout=20)
            feed.stop()
            engine.shutdown()
    print("| requests/s | CPU, % of a core | RSS, MiB |")
    print("|---|---|---|")
    print(f"| 0 | {idle[0]:.2f} | {idle[1]:.0f} |")
    print(f"| {options.rate:g} | {loaded[0]:.2f} | {loaded[1]:.0f} |")
    print(
        f"\n{counted:.0f} requests counted in {options.seconds:g} s; "
        f"{(loaded[0] - idle[0]) / options.rate * 1e4:.0f} us of CPU a request above idle"
    )
    if counted < 0.9 * options.rate * options.seconds:
        print(
            "the sidecar did not count what was offered: the figures say nothing", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

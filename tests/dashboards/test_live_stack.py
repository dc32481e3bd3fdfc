"""Every query of the overview, run by a real Prometheus on series that our own publisher writes.

The engine is invented (the acceptance run uses a real one); names, labels, rules, the Prometheus
and the queries are not.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from servoscope.alerts.spec import default_spec
from servoscope.dashboards.live import LiveError, main, prometheus_reader, silent_queries
from servoscope.exporters.catalog import CATALOG, Kind
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.sidecar.config import LabelsConfig
from servoscope.sidecar.measure.aggregate import Aggregate
from servoscope.sidecar.publish.families import TEXT_CONTENT_TYPE, Registry

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alerts" / "rules"
OVERVIEW = ROOT / "dashboards" / "generated" / "overview.json"
DATA_SECONDS = 90.0  # a bound on waiting; it takes about ten
#: One value a label, for metrics that describe an engine and not a request.
LABELS = {
    "engine": "vllm", "server": "127.0.0.1:8000", "model_name": "m", "model_version": "v1",
    "gpu_model": "none", "rank": "0", "knob": "chunk_tokens", "state": "ok", "source": "plugin",
    "phase": "decode", "request_type": "chat", "kv_tier": "device",
}  # fmt: skip


class Engine:
    """Numbers of an engine that is always busy: each read of /metrics finds them further on."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.aggregate = Aggregate(self.registry, default_spec().objectives, LabelsConfig())
        self.reads = 0

    def metrics(self) -> str:
        self.reads += 1
        for request_type in ("chat", "rag"):
            for version in ("v1", "v2"):
                self.aggregate.observe(self._request(request_type, version))
        for line in CATALOG:
            if line.since is None or line.part in ("request", "slo") or line.kind is Kind.HISTOGRAM:
                continue
            values = tuple(LABELS.get(label, "x") for label in line.labels)
            family = self.registry.family(line.name)
            if line.kind is Kind.COUNTER:
                family.add(values, 0.5 if "hit" in line.name else 1.0)
            else:
                family.set(values, time.time() if "timestamp" in line.name else 1.0)
        in_flight = ("vllm", "127.0.0.1:8000", "m", "v1", "none", "chat", "decode")
        self.registry.family("requests_in_flight").set(in_flight, 3.0)
        return self.registry.render()

    def _request(self, request_type: str, version: str) -> RequestRecord:
        return RequestRecord(
            request_id=f"{request_type}-{version}-{self.reads}",
            source=Source.PLUGIN,
            outcome=Outcome.COMPLETED if self.reads % 5 else Outcome.CLIENT_DISCONNECT,
            engine="vllm",
            server="127.0.0.1:8000",
            model_name="m",
            model_version=version,
            request_type=request_type,
            streaming=True,
            queue_seconds=0.02,
            time_to_first_token_seconds=0.2 + 0.01 * (self.reads % 7),
            time_per_output_token_seconds=0.03,
            e2e_seconds=1.5,
            prompt_tokens=512,
            output_tokens=40,
            cached_tokens=256,
        )


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The engine's /metrics on a free loopback port; gives HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = engine.metrics().encode()
            self.send_response(200)
            self.send_header("Content-Type", TEXT_CONTENT_TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def every_second(rules: Path, folder: Path) -> list[str]:
    """The committed rules with all groups evaluated each second, so that a test need not wait."""
    files = []
    for path in sorted(rules.glob("*.yaml")):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in tree["groups"]:
            group["interval"] = "1s"
        copy = folder / path.name
        copy.write_text(yaml.safe_dump(tree), encoding="utf-8")
        files.append(str(copy))
    return files


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """A real Prometheus that scrapes ``target`` each second; gives its URL, always ends it."""
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: apt-get install prometheus"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = {"job_name": "servoscope-sidecar", "static_configs": [{"targets": [target]}]}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": every_second(RULES, folder),
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.stack
def test_every_query_of_the_overview_has_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboard = json.loads(OVERVIEW.read_text(encoding="utf-8"))
    with serving(Engine()) as target, prometheus(target, tmp_path) as url:
        read = prometheus_reader(url)
        started = time.monotonic()
        report = ["never asked"]
        while report and time.monotonic() - started < DATA_SECONDS:
            time.sleep(1.0)
            try:
                silent = silent_queries(
                    read, dashboard, end=time.time(), window_seconds=60.0, rate_interval="10s"
                )
                report = [str(line) for line in silent]
            except LiveError as error:
                report = [str(error)]
        assert report == [], (tmp_path / "prometheus.log").read_text("utf-8", "replace")[-2000:]
        assert main([url, "--window", "60", "--rate-interval", "10s"]) == 0
        assert "of" in capsys.readouterr().out

        renamed = json.loads(json.dumps(dashboard).replace("servoscope_kv_usage_ratio", "gone"))
        (only,) = silent_queries(
            read, renamed, end=time.time(), window_seconds=60.0, rate_interval="10s"
        )
        assert (only.query.panel_title, only.why) == ("KV cache in use", "no series")

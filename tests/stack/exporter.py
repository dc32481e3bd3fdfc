"""A tiny exporter of hand-made counters, in the names and labels that a sidecar publishes.

It plays a sidecar whose engine serves a steady load. ``slow`` turns a share of the requests into
ones that are far over their threshold.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Exporter"]

_SLICE = (
    'engine="vllm",server="127.0.0.1:8000",model_name="m",model_version="v1",request_type="chat",'
    'gpu_model="none",streaming="true",source="plugin",tenant=""'
)
_FLEET = 'engine="vllm",server="127.0.0.1:8000",model_name="m",model_version="v1",gpu_model="none"'


class Exporter:
    """Serves /metrics on loopback. All counts are whole numbers that only grow."""

    def __init__(self, objective: str, requests_per_second: float, service: str = "llm") -> None:
        self.objective, self.service, self.rate = objective, service, requests_per_second
        self.slow = 0.0  # share of requests far over
        self._lock = threading.Lock()
        self._at = time.monotonic()
        self._total = self._over = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nothing: Prometheus' own `up` says who came."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """host:port, as file_sd wants it."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Serve until ``end``."""
        self._thread.start()

    def end(self) -> None:
        """Refuse connections from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=10)
        self._server.server_close()

    def set_slow(self, share: float) -> None:
        """From now on ``share`` of the requests are far over."""
        with self._lock:
            self._advance()
            self.slow = share

    def text(self) -> str:
        """The exposition at this moment."""
        with self._lock:
            self._advance()
            total, over = int(self._total), int(self._over)
        labels = f'service="{self.service}",objective="{self.objective}",{_SLICE}'
        chosen = f'service="{self.service}",objective="{self.objective}"'
        return (
            "# TYPE servoscope_slo_total counter\n"
            f"servoscope_slo_total{{{labels}}} {total}\n"
            "# TYPE servoscope_slo_good_total counter\n"
            f"servoscope_slo_good_total{{{labels}}} {total - over}\n"
            "# TYPE servoscope_slo_over_total counter\n"
            f'servoscope_slo_over_total{{{labels},factor="1.5"}} {over}\n'
            "# TYPE servoscope_slo_target_ratio gauge\n"
            f"servoscope_slo_target_ratio{{{chosen}}} 0.99\n"
            "# TYPE servoscope_engine_up gauge\n"
            f"servoscope_engine_up{{{_FLEET}}} 1\n"
        )

    def _advance(self) -> None:
        now = time.monotonic()
        requests = (now - self._at) * self.rate
        self._at = now
        self._total += requests
        self._over += requests * self.slow

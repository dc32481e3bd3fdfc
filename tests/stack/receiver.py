"""A webhook receiver for Alertmanager's notifications: keeps each one with the time it came."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Notification", "Receiver"]

MAX_BODY_BYTES = 4_194_304


@dataclass(frozen=True)
class Notification:
    """One POST. ``tier`` is the path it came to."""

    at_unix_seconds: float
    tier: str
    body: dict[str, Any]

    @property
    def status(self) -> str:
        """firing while any alert of the group fires, else resolved."""
        return str(self.body["status"])

    @property
    def group_key(self) -> str:
        """What a pager resolves an incident by."""
        return str(self.body["groupKey"])

    def alert_names(self, status: str | None = None) -> set[str]:
        """Names of its alerts, of one status or of all."""
        return {
            a["labels"]["alertname"]
            for a in self.body["alerts"]
            if status is None or a["status"] == status
        }


class Receiver:
    """An HTTP server on loopback; ``url(tier)`` is what a webhook_config is given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Notification] = []
        self.refused = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                try:
                    body = json.loads(self.rfile.read(min(length, MAX_BODY_BYTES)))
                    seen = Notification(time.time(), self.path.strip("/"), body)
                    with outer._lock:
                        outer._kept.append(seen)
                    self.send_response(200)
                except ValueError:
                    outer.refused += 1
                    self.send_response(400)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nothing: the notifications are the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        """Serve until ``end``."""
        self._thread.start()

    def end(self) -> None:
        """Stop serving and close the socket."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=10)
        self._server.server_close()

    def url(self, tier: str) -> str:
        """Where the notifications of a tier go."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{tier}"

    def notifications(self, tier: str | None = None) -> list[Notification]:
        """What has come so far, oldest first."""
        with self._lock:
            return [n for n in self._kept if tier is None or n.tier == tier]

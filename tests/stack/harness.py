"""A real Prometheus and Alertmanager on loopback, with our rules and routes, for tests and scripts.

with Stack(tmp_path) as stack:
    stack.set_targets("servoscope-sidecar", ["127.0.0.1:9790"])
    page = stack.wait(lambda: stack.receiver.notifications("page"), 180)
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from servoscope.alerts.alertmanager import Notify, Webhook, compile_alertmanager
from servoscope.alerts.data import data_directory
from stack.processes import Process, ensure_installed, free_port, program
from stack.receiver import Receiver

__all__ = ["Stack", "StackError", "speed_up"]

T = TypeVar("T")
_ATTEMPTS = 3
_READY_SECONDS = 60.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StackError(RuntimeError):
    """A program of the stack did not do what it should; the text has the end of its log."""


def speed_up(alertmanager_yaml: str, wait: str = "1s", interval: str = "2s") -> str:
    """The same routes with short waits, for tests whose windows are short as well."""
    document = yaml.safe_load(alertmanager_yaml)
    for route in (document["route"], *document["route"]["routes"]):
        route["group_wait"], route["group_interval"] = wait, interval
    return yaml.safe_dump(document)


class Stack:
    """Prometheus, Alertmanager and a webhook receiver; everything is ended on the way out.

    Args:
        directory: for configuration, data and logs; must exist.
        rule_files: Prometheus rule files; by default the committed ones.
        alertmanager_yaml: by default our routes, each to ``receiver`` under its tier's name.
        scrape_seconds: scrape and evaluation interval.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rule_files: Sequence[Path] | None = None,
        alertmanager_yaml: str | None = None,
        scrape_seconds: int = 5,
    ) -> None:
        self.directory = directory
        self.receiver = Receiver()
        self.rule_files = (
            sorted(data_directory("rules").glob("*.yaml")) if rule_files is None else rule_files
        )
        self.scrape_seconds = scrape_seconds
        self._alertmanager_yaml = alertmanager_yaml
        self._processes: list[Process] = []
        self._targets: dict[str, list[str]] = {}
        self.prometheus_url = ""
        self.alertmanager_url = ""

    def __enter__(self) -> Self:
        ensure_installed()
        self.receiver.start()
        try:
            self.alertmanager_url = self._start("prometheus-alertmanager", self._alertmanager)
            self.prometheus_url = self._start("prometheus", self._prometheus)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started. Safe to call more than once."""
        for process in reversed(self._processes):
            process.end()
        self._processes.clear()
        self.receiver.end()

    def set_targets(self, job: str, addresses: Sequence[str]) -> None:
        """What Prometheus scrapes under ``job`` from now on (it watches the file)."""
        self._targets[job] = list(addresses)
        groups = [
            {"targets": addresses, "labels": {"job": job}}
            for job, addresses in self._targets.items()
            if addresses
        ]
        path = self.directory / "targets" / "targets.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(groups), encoding="utf-8")
        fresh.replace(path)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of ``expr``: metric and value of each series."""
        answer = self._get(f"{self.prometheus_url}/api/v1/query", {"query": expr})
        result = answer["data"]["result"]
        if answer["data"]["resultType"] == "scalar":
            return [{"metric": {}, "value": result}]
        return list(result)

    def value(self, expr: str) -> float | None:
        """The value of the first series of ``expr``, None when there is none."""
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """Names of the alerts that Prometheus has firing."""
        alerts = self._get(f"{self.prometheus_url}/api/v1/alerts", {})["data"]["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    def rule_errors(self) -> list[str]:
        """Rules whose last evaluation failed, with the error."""
        groups = self._get(f"{self.prometheus_url}/api/v1/rules", {})["data"]["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]

    def wait(self, condition: Callable[[], T], seconds: float, what: str = "condition") -> T:
        """The first true value of ``condition``. Raises StackError after ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() >= end:
                raise StackError(f"{what}: not within {seconds:g} s. Firing: {self.firing()}")
            time.sleep(0.25)

    # ---- starting ------------------------------------------------------------------------------

    def _start(self, name: str, arguments: Callable[[str], list[str]]) -> str:
        for _ in range(_ATTEMPTS):  # another process may take the port in between
            address = f"127.0.0.1:{free_port()}"
            executable = program(name)
            assert executable is not None
            process = Process([executable, *arguments(address)], self.directory / f"{name}.log")
            self._processes.append(process)
            process.start()
            if self._ready(f"http://{address}/-/ready", process):
                return f"http://{address}"
            process.end()
        raise StackError(f"{name} did not become ready:\n{process.tail()}")

    def _ready(self, url: str, process: Process) -> bool:
        end = time.monotonic() + _READY_SECONDS
        while process.running and time.monotonic() < end:
            with contextlib.suppress(OSError), _OPENER.open(url, timeout=2) as answer:
                if answer.status == 200:
                    return True
            time.sleep(0.1)
        return False

    def _alertmanager(self, address: str) -> list[str]:
        text = self._alertmanager_yaml
        path = self.directory / "alertmanager.yaml"
        if text is None:
            text = compile_alertmanager()
        path.write_text(with_receiver(text, self.receiver), encoding="utf-8")
        return [
            f"--config.file={path}",
            f"--storage.path={self.directory / 'alertmanager'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
            "--data.retention=200h",
        ]

    def _prometheus(self, address: str) -> list[str]:
        targets = self.directory / "targets"
        targets.mkdir(exist_ok=True)
        interval = f"{self.scrape_seconds}s"
        receiver = urllib.parse.urlsplit(self.alertmanager_url).netloc
        document = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in self.rule_files],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [receiver]}]}]},
            "scrape_configs": [
                {
                    "job_name": "servoscope",
                    "honor_labels": False,
                    "file_sd_configs": [
                        {"files": [str(targets / "*.json")], "refresh_interval": "5s"}
                    ],
                }
            ],
        }
        path = self.directory / "prometheus.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return [
            f"--config.file={path}",
            f"--storage.tsdb.path={self.directory / 'prometheus'}",
            "--storage.tsdb.retention.time=40d",
            f"--web.listen-address={address}",
        ]

    def _get(self, url: str, parameters: dict[str, str]) -> dict[str, Any]:
        whole = f"{url}?{urllib.parse.urlencode(parameters)}"
        try:
            with _OPENER.open(whole, timeout=30) as answer:
                loaded: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            raise StackError(f"{whole}: {error.code} {error.read()[:500]!r}") from error
        except OSError as error:
            logs = "\n".join(process.tail() for process in self._processes)
            raise StackError(f"{whole}: {error}\n{logs}") from error
        return loaded


def with_receiver(alertmanager_yaml: str, receiver: Receiver) -> str:
    """The configuration with every receiver replaced by our own webhook under its name."""
    document = yaml.safe_load(alertmanager_yaml)
    mine = yaml.safe_load(
        compile_alertmanager(
            Notify(
                page=(Webhook(url=receiver.url("page")),),
                ticket=(Webhook(url=receiver.url("ticket")),),
                capacity=(Webhook(url=receiver.url("capacity")),),
            )
        )
    )
    document["receivers"] = mine["receivers"]
    return yaml.safe_dump(document)

"""Captures what a real SGLang says, as fixtures: ``python -m engines.sglang_capture`` in tests/.

Each form is one server on the CPU under the same short load: streamed and whole, chat and
completions, with shared prefixes, one that leaves early and one that is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.process import ROOT, cache_directory
from engines.sglang_cpu import VERSION, SglangServer
from servoscope.lab.client import CHAT, COMPLETIONS, Observed, PlannedRequest, run_closed

__all__ = ["FORMS", "Form", "capture", "plan"]

FIXTURES = ROOT / "tests" / "fixtures" / "engines" / "sglang"
MODEL_NAME = "model"
LABEL_HEADER = "x-custom-labels"


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run the server; ``folder`` is where its files lie, below the version's."""

    folder: str
    tp: int = 1
    args: Sequence[str] = ()


FORMS: Mapping[str, Form] = {
    "plain": Form("."),
    "ranks": Form("ranks", tp=2, args=["--enable-metrics-for-all-schedulers"]),
    "labels": Form(
        "labels", args=["--tokenizer-metrics-allowed-custom-labels", "tenant", "request_type"]
    ),
}


def plan(size: int = 24) -> Iterator[PlannedRequest]:
    """The load: ``size`` requests, two in three with a prefix that others have too."""
    for number in range(size):
        shared = "def area(width, height):\n    return width * height\n" * 8
        prompt = f"# {number}\nimport os\n" if number % 3 == 0 else f"{shared}# {number}\n"
        tenant = "blue" if number % 2 else "green"
        labels = {"tenant": tenant, "request_type": "code", "not_listed": "x"}
        yield PlannedRequest(
            request_id=f"capture-{number}",
            prompt=prompt,
            endpoint=CHAT if number % 4 == 0 else COMPLETIONS,
            max_tokens=4 + number % 5 * 8,
            streaming=number % 2 == 0,
            model=MODEL_NAME,
            headers={LABEL_HEADER: json.dumps(labels)},
            abort_after_token_events=2 if number == 6 else None,
        )


def capture(version: str, form: Form, directory: Path, args: Sequence[str] = ()) -> list[Observed]:
    """Run one form of one version and write its files. Raises EngineError."""
    directory /= form.folder
    directory.mkdir(parents=True, exist_ok=True)
    more = ["--served-model-name", MODEL_NAME, *form.args, *args]
    with SglangServer(version=version, tp=form.tp, args=more) as server:

        def write(name: str, text: str) -> None:
            for private, public in (
                (str(server.request_metrics_dir.parent), "/tmp/server"),
                (str(cache_directory()), "/cache"),
            ):
                text = text.replace(private, public)
            (directory / name).write_text(text.rstrip("\n") + "\n")

        observed, loads = asyncio.run(_under_load(server))
        with contextlib.suppress(urllib.error.HTTPError):
            too_long = {"model": MODEL_NAME, "prompt": [5] * 9000, "max_tokens": 1}
            server.post_json(COMPLETIONS, too_long)
        write("metrics.txt", server.get_text("/metrics/"))
        with contextlib.suppress(urllib.error.HTTPError):
            info = server.get_json("/server_info")
            write("server_info.json", json.dumps(info, indent=1, sort_keys=True))
        if loads is not None:
            write("v1_loads.json", json.dumps(loads, indent=1))
        hours = sorted(server.request_metrics_dir.glob("*.log"))
        if hours:
            write("request-metrics.jsonl", "".join(hour.read_text() for hour in hours))
    return observed


async def _under_load(server: SglangServer) -> tuple[list[Observed], object]:
    """What the client saw, and /v1/loads with requests running (None: not in this version)."""
    load = asyncio.create_task(run_closed(server.url, plan(), 6))
    seen: object = None
    try:
        while not load.done():
            await asyncio.sleep(0.05)
            now = await asyncio.to_thread(server.get_json, "/v1/loads")
            running = sum(rank["num_running_reqs"] for rank in now["loads"])
            if seen is None or running:
                seen = now
    except (urllib.error.HTTPError, KeyError):
        seen = None
    return await load, seen


def _main() -> None:
    parser = argparse.ArgumentParser(description="Capture fixtures from a real SGLang on the CPU.")
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--form", choices=[*FORMS], action="append")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    parser.add_argument("args", nargs="*", help="further arguments for the server, after --")
    asked = parser.parse_args()
    for name in asked.form or FORMS:
        seen = capture(asked.version, FORMS[name], asked.out / asked.version, asked.args)
        outcomes = sorted(o.outcome.value for o in seen)
        counts = {outcome: outcomes.count(outcome) for outcome in outcomes}
        print(f"{asked.version} {name}: {counts}")


if __name__ == "__main__":
    _main()

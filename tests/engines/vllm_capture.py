"""Captures what a real vLLM says, as fixtures, and tries our plug-in in it.

``python -m engines.vllm_capture VERSION`` in tests/ does the whole of it, from nothing: it builds
an environment with that release (vllm_release.py; ``--home`` says where), and runs the server twice
on the CPU under the same short load: streamed and whole, chat and completions, with shared
prefixes, one client that leaves early and one request that is refused. First without anything of
ours, for the fixture; then with this checkout installed into the environment, for what it can do
there. Two to four minutes. Where the release's compiled operators do not load beside the torch that
is there, those of vllm_ops.py compute instead, and the output says so.

Without VERSION, ``--home`` is an environment with some vLLM in it, made by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import urllib.error
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.background import background
from engines.process import ROOT, EngineError, install_checkout
from engines.vllm_cpu import VllmServer
from engines.vllm_cpu import model as random_model
from engines.vllm_release import operators, release
from servoscope.exporters.knobs.client import KnobClient, find_knob_sockets
from servoscope.exporters.records import Outcome, RequestRecord
from servoscope.exporters.vllm.requests import StatsClient, find_stats_sockets
from servoscope.lab.client import CHAT, COMPLETIONS, Observed, PlannedRequest, run_closed

__all__ = ["Findings", "InstalledServer", "capture", "plan", "try_plugin"]

FIXTURES = ROOT / "tests" / "fixtures" / "engines" / "vllm"
CHUNK = 256
CAUSES = 5


class InstalledServer(VllmServer):
    """A server of whatever vLLM is installed in ``home``, with the model in ``model_directory``."""

    def __init__(self, home: Path, model_directory: Path, **options: Any) -> None:
        super().__init__(**options)
        self._home = home
        self._model = model_directory

    def _python(self) -> Path:
        return self._home / "bin" / "python"

    def _model_directory(self) -> Path:
        return self._model

    def log_tail(self, size: int = 4000) -> str:
        """The errors of the engine's own process first: the API server's come long after them."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        causes = [one for one in lines if "EngineCore" in one and "Error: " in one]
        return "\n".join([*causes[:CAUSES], super().log_tail(size)])


def plan(size: int = 36) -> Iterator[PlannedRequest]:
    """The load: ``size`` requests, two in three with a prefix that others have too."""
    for number in range(size):
        shared = "def area(width, height):\n    return width * height\n" * 24
        prompt = f"# {number}\nimport os\n" if number % 3 == 0 else f"{shared}# {number}\n"
        leaves = number == 6
        yield PlannedRequest(
            request_id=f"capture-{number}",
            prompt=prompt,
            endpoint=CHAT if number % 4 == 0 else COMPLETIONS,
            max_tokens=4000 if leaves else 4 + number % 5 * 8,
            streaming=number % 2 == 0,
            abort_after_token_events=2 if leaves else None,
        )


def _load(server: VllmServer, size: int = 36) -> list[Observed]:
    observed = asyncio.run(run_closed(server.url, plan(size), 6, keep_alive=True))
    with contextlib.suppress(urllib.error.HTTPError):
        too_long = {"model": server.model_name, "prompt": [5] * 9000, "max_tokens": 1}
        server.post_json(COMPLETIONS, too_long)
    return observed


def capture(home: Path, model: Path, out: Path) -> tuple[str, dict[str, int]]:
    """The release that runs in ``home``, its files written below ``out``, and what clients saw.

    Raises EngineError when it does not start, or serves nothing.
    """
    with InstalledServer(home, model, plugin=False, kind="installed") as server:
        version = str(server.get_json("/version")["version"])
        observed = _load(server)
        if not any(o.outcome is Outcome.LENGTH for o in observed):
            tail = server.log_tail(8000)
            raise EngineError(f"no request was served: {outcomes(observed)}\n{tail}")
        directory = out / version.partition("+")[0]
        directory.mkdir(parents=True, exist_ok=True)

        def write(name: str, text: str) -> None:
            for private, public in ((str(model), "/models/tiny"), (str(home), "/venv")):
                text = text.replace(private, public)
            (directory / name).write_text(text.rstrip("\n") + "\n")

        write("metrics.txt", server.get_text("/metrics"))
        write("version.json", json.dumps(server.get_json("/version")))
    return version, outcomes(observed)


def outcomes(observed: list[Observed]) -> dict[str, int]:
    """How many requests ended how."""
    found = sorted(o.outcome.value for o in observed)
    return {outcome: found.count(outcome) for outcome in found}


@dataclass
class Findings:
    """What our plug-in could do in one release."""

    clients: dict[str, int] = field(default_factory=dict)
    stats_socket: bool = False
    missing: list[str] = field(default_factory=list)
    off: str = ""
    clocks: str = ""
    records: int = 0
    wrong: list[str] = field(default_factory=list)
    medians_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    knobs_socket: bool = False
    chunk: str = ""
    log: list[str] = field(default_factory=list)


def try_plugin(home: Path, model: Path) -> Findings:
    """Install this checkout into ``home`` and say what it does in that vLLM."""
    install_checkout(home, home / "bin" / "python")
    found = Findings()
    with InstalledServer(home, model, knobs=True, kind="installed") as server:
        asyncio.run(_observe(server, found))
        asyncio.run(_steer(server, found))
        lines = server.log_path.read_text(errors="replace").splitlines()
        found.log = [line[-300:] for line in lines if "servoscope:" in line]
    return found


async def _observe(server: VllmServer, found: Findings) -> None:
    paths = find_stats_sockets([server.run_dir], server.pids())
    found.stats_socket = bool(paths)
    if not paths:
        found.clients = outcomes(await asyncio.to_thread(_load, server))
        return
    client = StatsClient(paths[0], open_poll_seconds=0.1)
    records: list[RequestRecord] = []
    async with background(client.run(records.append)):
        observed = await asyncio.to_thread(_load, server)
        for _ in range(100):
            if len(records) >= len(observed):
                break
            await asyncio.sleep(0.1)
    found.clients = outcomes(observed)
    if client.hello is not None:
        found.missing, found.off = list(client.hello.missing), client.hello.off
    found.clocks = f"received_by {client.received_by}, ttft_by {client.ttft_by}"
    found.records = len(records)
    found.wrong = list(differences(observed, records))
    found.medians_ms = medians(observed, records)


def pairs(
    observed: list[Observed], records: list[RequestRecord]
) -> Iterator[tuple[Observed, RequestRecord | None]]:
    """Each request as the client saw it, and our record of it."""
    by_id = {r.request_id: r for r in records}
    for seen in observed:
        prefix = "chatcmpl-" if seen.endpoint == CHAT else "cmpl-"
        yield seen, by_id.get(seen.response_id or prefix + seen.request_id)


def differences(observed: list[Observed], records: list[RequestRecord]) -> Iterator[str]:
    """Where a record is not what its client saw."""
    for seen, record in pairs(observed, records):
        if record is None:
            yield f"{seen.request_id}: no record"
            continue
        ours: tuple[Any, ...] = (record.outcome.value, record.streaming)
        theirs: tuple[Any, ...] = (seen.outcome.value, seen.streaming)
        if seen.outcome is not Outcome.CLIENT_DISCONNECT:
            ours += (record.prompt_tokens, record.output_tokens)
            theirs += (seen.prompt_tokens, seen.output_tokens)
            if seen.cached_tokens is not None:  # 0.9 says it of chats only
                ours, theirs = (*ours, record.cached_tokens), (*theirs, seen.cached_tokens)
        if ours != theirs:
            yield f"{seen.request_id}: {ours}, the client has {theirs}"


def medians(
    observed: list[Observed], records: list[RequestRecord]
) -> dict[str, tuple[float, float]]:
    """Milliseconds, ours and the client's, over streamed requests that ended well."""
    both = [
        (record, seen)
        for seen, record in pairs(observed, records)
        if record is not None and seen.streaming and seen.tpot_seconds is not None
    ]
    found = {}
    for name, own, client in (
        ("ttft", "time_to_first_token_seconds", "ttft_seconds"),
        ("tpot", "time_per_output_token_seconds", "tpot_seconds"),
        ("e2e", "e2e_seconds", "e2e_seconds"),
        ("queue", "queue_seconds", None),
    ):
        ours = [v for r, _ in both if (v := getattr(r, own)) is not None]
        theirs = [v for _, s in both if client and (v := getattr(s, client)) is not None]
        if ours:
            found[name] = (
                round(statistics.median(ours) * 1e3, 2),
                round(statistics.median(theirs) * 1e3, 2) if theirs else -1.0,
            )
    return found


async def _steer(server: VllmServer, found: Findings) -> None:
    """Set the chunk, and see that no step is larger."""
    paths = find_knob_sockets([server.run_dir], server.pids())
    found.knobs_socket = bool(paths)
    if not paths:
        return
    control = await KnobClient.connect(paths[0])
    try:
        long = "import os, sys, json  # a long prompt to be cut into chunks\n" * 70

        def prompts(tag: str) -> list[PlannedRequest]:
            return [
                PlannedRequest(request_id=f"{tag}{n}", prompt=f"# {tag}{n}\n{long}", max_tokens=4)
                for n in range(3)
            ]

        await control.get()
        await run_closed(server.url, prompts("before"), 3)
        before = (await control.get()).step_tokens_max
        await control.lease("capture")
        applied = await control.set({"chunk_tokens": CHUNK})
        await control.get()
        await run_closed(server.url, prompts("during"), 3)
        state = await control.get()
        found.chunk = (
            f"applied {applied}, largest step {before} -> {state.step_tokens_max}, "
            f"reads {state.knobs['chunk_tokens'].value}, faults {state.faults}"
        )
        await control.release()
        found.chunk += f", released {(await control.get()).knobs['chunk_tokens'].value}"
    except Exception as error:
        found.chunk = f"{found.chunk} {error!r}"
    finally:
        await control.aclose()


def _main() -> None:
    parser = argparse.ArgumentParser(description="Capture a real vLLM, and try the plug-in in it.")
    parser.add_argument("version", nargs="?", help="release of vLLM, as 0.25.1")
    parser.add_argument("--home", type=Path, help="environment; built where VERSION is given")
    parser.add_argument("--model", type=Path, help="model directory (default: a small random one)")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    parser.add_argument("--only", choices=("capture", "plugin"))
    asked = parser.parse_args()
    if asked.version is None and asked.home is None:
        parser.error("say which VERSION, or --home")
    home = asked.home if asked.version is None else release(asked.version, asked.home)
    model = asked.model or random_model("tiny")
    print(f"operators: {operators(home)}", flush=True)
    if asked.only != "plugin":
        version, seen = capture(home, model, asked.out)
        print(f"{version}: {seen}", flush=True)
    if asked.only != "capture":
        print(json.dumps(asdict(try_plugin(home, model)), indent=1))


if __name__ == "__main__":
    _main()

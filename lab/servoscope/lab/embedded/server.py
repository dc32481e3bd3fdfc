"""The embedded engine: the real llama.cpp server of the xllamacpp wheel, in a process of its own.

``python -m servoscope.lab.embedded.server --port 8080`` runs it; ``EmbeddedEngine`` starts, awaits
and always ends that process. It listens on loopback only, and it ends with its parent: the parent
holds the write end of a pipe that is the child's standard input (PR_SET_PDEATHSIG would fire when
the parent's *thread* ends).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from servoscope.exporters.paths import private_directory, run_dir, state_dir
from servoscope.exporters.plugin.sockets import GROUP_VARIABLE
from servoscope.lab.embedded.chunk_hook import ChunkHook, HookError, restart_preloaded
from servoscope.lab.embedded.chunk_knob import ChunkPilot, serve_chunk

if TYPE_CHECKING:
    from types import TracebackType

    from servoscope.exporters.plugin.line_server import LineServer

__all__ = ["EmbeddedEngine", "EngineStartError", "default_directory", "main"]

ALIAS = "embedded-tiny"
END_SECONDS = 5.0  # from the signal to the kill
MAX_UBATCH_TOKENS = 256


class EngineStartError(RuntimeError):
    """The embedded engine did not come up; the text says why and what to do."""


def default_directory() -> Path:
    """Where the model and the log are kept."""
    return private_directory(state_dir()) / "embedded"


class EmbeddedEngine:
    """Starts the server on a free port, waits until it answers, and ends it on exit.

    ``with EmbeddedEngine() as engine: engine.url``. Blocks for about a second, never longer than
    ``ready_seconds``; from asyncio use ``await asyncio.to_thread(engine.start)``. ``threads`` is
    what the model's arithmetic may use; one leaves the second core of a small machine to the rest.
    ``sleep_idle_seconds``: the model is unloaded when idle for so long; -1: never.
    ``live_chunk`` makes ``chunk_tokens`` a knob (docs/adr/0005); it needs a C compiler, once.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        slots: int = 4,
        context_tokens: int = 2048,
        threads: int = 1,
        batch_tokens: int = 512,
        sleep_idle_seconds: int = -1,
        live_chunk: bool = False,
        model: Path | None = None,
        ready_seconds: float = 60.0,
    ) -> None:
        self.directory = directory or default_directory()
        self.log_path = self.directory / "engine.log"
        self.url = ""
        self.port = port
        self.version = ""  # of the wheel, whose date names the llama.cpp build
        # In the words of llama-server where it has some: a sidecar reads them from there.
        self._options = {
            "parallel": slots,
            "context-tokens": context_tokens,
            "threads": threads,
            "batch-size": batch_tokens,
            "ubatch-size": min(MAX_UBATCH_TOKENS, batch_tokens),
            "sleep-idle-seconds": sleep_idle_seconds,
        }
        self._live_chunk = live_chunk
        self._model = model
        self._ready_seconds = ready_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The server's process id; 0 while it is not started."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server and wait until it answers. Raises EngineStartError."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineStartError(
                "the embedded engine needs the xllamacpp package: pip install 'servoscope[lab]'"
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready, tell = os.pipe()
        command = [sys.executable, "-m", __name__, "--directory", str(self.directory)]
        if self._model is not None:
            command += ["--model", str(self._model)]
        command += ["--port", str(self.port), "--end-with-stdin", "--ready-fd", str(tell)]
        if self._live_chunk:
            command.append("--live-chunk")
        for name, value in self._options.items():
            command += [f"--{name}", str(value)]
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(tell,),
                    start_new_session=True,  # Ctrl-C is for the parent: it ends us in its order
                )
        finally:
            os.close(tell)
        try:
            self._await_ready(ready)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(ready)
        return self

    def _await_ready(self, ready: int) -> None:
        deadline = time.monotonic() + self._ready_seconds
        told = b""
        while not told.endswith(b"\n"):
            if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineStartError(
                    f"the embedded engine was not ready in {self._ready_seconds:g} s; "
                    f"see {self.log_path}"
                )
            part = os.read(ready, 4096)
            if not part:
                raise EngineStartError(f"the embedded engine ended at its start:\n{self._tail()}")
            told += part
        hello = json.loads(told)
        self.url, self.port, self.version = hello["url"], hello["port"], hello["version"]
        while not _answers(f"{self.url}/health"):
            if time.monotonic() > deadline or not self.alive:
                raise EngineStartError(f"the embedded engine does not answer:\n{self._tail()}")
            time.sleep(0.05)

    def _tail(self) -> str:
        return self.log_path.read_text("utf-8", "replace")[-1500:].strip()

    def stop(self) -> int | None:
        """End the server; its exit code, None if it never ran. Never leaves the process behind."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        process.terminate()
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    try:
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# What follows runs in the server's own process.


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the server until SIGTERM, SIGINT or, with --end-with-stdin, the end of the parent."""
    options = _parser().parse_args(argv)
    hook = _hook(options.directory) if options.live_chunk else None
    signals = {signal.SIGTERM, signal.SIGINT}
    # Blocked before any thread exists, so that every thread of the server inherits it and the
    # signal is taken by sigwait below, never in the middle of the C++ code.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = _serve(options, options.model or _made_model(options.directory))
    knob = _serve_knob(hook, options.parallel) if hook is not None else None
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    if options.ready_fd is not None:
        _tell(options.ready_fd, server)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201 - a program's output
    signal.sigwait(signals)
    if knob is not None:
        knob.stop()
    # Not by deleting the server: that holds the interpreter's lock and waits for open streams (it
    # hung for as long as one was open). There is no state to save; the kernel closes the rest.
    sys.stdout.flush()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="servoscope-embedded-engine", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the tiny random one")
    parser.add_argument("--directory", type=Path, help="where the tiny model is kept")
    parser.add_argument("--parallel", type=int, default=4, help="requests served at once")
    parser.add_argument("--context-tokens", type=int, default=2048, help="context of one slot")
    parser.add_argument("--threads", type=int, default=1, help="threads of the arithmetic")
    parser.add_argument("--batch-size", type=int, default=512, help="prefill chunk, tokens")
    parser.add_argument("--ubatch-size", type=int, default=256, help="computed at once, tokens")
    parser.add_argument("--sleep-idle-seconds", type=int, default=-1, help="-1: never")
    parser.add_argument(
        "--live-chunk", action="store_true", help="chunk_tokens is a knob; needs a C compiler, once"
    )
    parser.add_argument("--verbosity", type=int, default=1, help="1 errors, 2 warnings, 3 all")
    parser.add_argument("--end-with-stdin", action="store_true", help="end at standard input's end")
    parser.add_argument("--ready-fd", type=int, help="write one JSON line there when ready")
    return parser


def _hook(directory: Path | None) -> ChunkHook:
    """The hook that this process was started with; without it, it starts itself anew with it."""
    hook = ChunkHook.preloaded()
    if hook is None:
        try:
            restart_preloaded((directory or default_directory()) / "hook")
        except (HookError, OSError) as error:
            raise SystemExit(f"error: {error}") from error
    return hook


def _serve_knob(hook: ChunkHook, slots: int) -> LineServer:
    pilot = ChunkPilot(hook, slots=slots, model_name=ALIAS)
    return serve_chunk(pilot, run_dir(), os.environ.get(GROUP_VARIABLE) or None)


def _made_model(directory: Path | None) -> Path:
    from servoscope.lab.embedded.gguf import cached_model  # noqa: PLC0415 - numpy, for once only

    return cached_model(directory or default_directory())


def _serve(options: argparse.Namespace, model: Path) -> Any:
    import xllamacpp  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415 - 30 MB, here only

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {ALIAS}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.n_parallel = options.parallel
    params.n_ctx = options.parallel * options.context_tokens
    params.cont_batching = True
    params.sleep_idle_seconds = options.sleep_idle_seconds
    params.n_batch = options.batch_size
    params.n_ubatch = min(options.ubatch_size, options.batch_size)
    # Cached prompts: the default would let them grow to 8 GiB. At 256 MiB the shipped sample hits
    # all that its prefixes share (17.4 % of its prompt tokens); at 64 MiB it hit 6.6 %.
    params.cache_ram_mib = 256
    params.fit_params = False
    params.verbosity = options.verbosity
    # One thread serves one connection for as long as it is open, idle keep-alive included.
    params.n_threads_http = options.parallel + 28
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = options.threads
        cpu.poll = 0  # the default spins between batches
    return xllamacpp.Server(params)


def _tell(ready_fd: int, server: Any) -> None:
    url = str(server.listening_address)
    hello = {
        "url": url,
        "port": int(url.rsplit(":", 1)[1]),
        "version": importlib.metadata.version("xllamacpp"),
    }
    os.write(ready_fd, json.dumps(hello).encode() + b"\n")
    os.close(ready_fd)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()

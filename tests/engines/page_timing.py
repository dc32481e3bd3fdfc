"""A TTFT breach on a real vLLM, from the flood to the page and from its end to the resolution.

    python -m engines.page_timing          (in tests/; committed windows; about 10 minutes)

Healthy load is one short prompt after the other; the breach is a flood of long prompts, which queue
behind each other. The objective's threshold is lower than the default's, because the model is tiny.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from engines.product import Product, wait_for
from engines.vllm_cpu import VllmServer
from servoscope.alerts.alertmanager import compile_alertmanager
from servoscope.alerts.rules import compile_engine_rules, compile_rules
from servoscope.alerts.settings import RuleSettings
from servoscope.alerts.spec import load_spec
from servoscope.lab.client import Limits, run_closed
from servoscope.lab.plan import FOUR_TYPES, mixed_plan
from stack.harness import Stack
from stack.page_timing import Timing

__all__ = ["SPEC", "Load", "breach_and_recover", "product_with_spec", "rule_files"]

SPEC = """\
service: llm
objectives:
  - name: ttft
    sli: time_to_first_token
    threshold: 750ms
    target: 99%
    window: 30d
  - name: errors
    sli: error_ratio
    target: 99.5%
    window: 30d
"""
CHAT, SUMMARISE = FOUR_TYPES[0], FOUR_TYPES[1]


class Load:
    """Healthy load until ``flood`` is set, a flood while it is; ends with ``close``."""

    def __init__(self, url: str) -> None:
        self.flood = threading.Event()
        self.sent = 0
        self._url = url
        self._end = threading.Event()
        self._seeds = itertools.count(int(time.time()))
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop sending and wait for what is in flight."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            flood = self.flood.is_set()
            plan = mixed_plan(
                24 if flood else 4,
                seed=next(self._seeds),
                types=(SUMMARISE,) if flood else (CHAT,),
                model="tiny",
                vocabulary=range(10, 2000),
                shared_share=0.0,
            )
            seen = asyncio.run(
                run_closed(self._url, plan, 24 if flood else 1, limits=Limits(total_seconds=120.0))
            )
            self.sent += sum(one.sent for one in seen)


def rule_files(directory: Path, settings: RuleSettings) -> list[Path]:
    """The rules of SPEC with these windows."""
    paths = [directory / "objectives.yaml", directory / "engines.yaml"]
    paths[0].write_text(compile_rules(load_spec(SPEC), settings), encoding="utf-8")
    paths[1].write_text(compile_engine_rules(settings), encoding="utf-8")
    return paths


def product_with_spec(home: Path, engine: VllmServer, port: int = 9660) -> Product:
    """A product whose sidecar classifies by SPEC."""
    home.mkdir(parents=True, exist_ok=True)
    spec = home / "slo.yaml"
    spec.write_text(SPEC)
    return Product(
        home=home,
        engine_url=engine.url,
        run_dir=engine.run_dir,
        config=f"sidecar: {{warmup_seconds: 0, scrape_interval_seconds: 1}}\nslos: ['{spec}']\n",
        collector_port=port,
    )


def breach_and_recover(
    stack: Stack, product: Product, load: Load, *, settle: float, breach: float, patience: float
) -> Timing:
    """Healthy for ``settle`` s, a flood of at least ``breach`` s, healthy again until resolved."""
    stack.set_targets("servoscope-sidecar", [product.sidecar_url.removeprefix("http://")])
    load.start()
    stack.wait(lambda: stack.query("servoscope:slo_events:rate5m"), patience, "the first rates")
    time.sleep(settle)
    assert not stack.receiver.notifications("page"), "something paged before the breach"
    began = time.time()
    load.flood.set()
    page = stack.wait(lambda: stack.receiver.notifications("page"), patience, "a page")[0]
    time.sleep(max(0.0, breach - (time.time() - began)))
    load.flood.clear()
    ended = time.time()
    stack.wait(
        lambda: stack.receiver.notifications("page")[-1].status == "resolved",
        patience,
        "the end of the page",
    )
    pages = stack.receiver.notifications("page")
    return Timing(
        page_seconds=page.at_unix_seconds - began,
        resolve_seconds=pages[-1].at_unix_seconds - ended,
        pages=pages,
    )


@contextlib.contextmanager
def running(load: Load) -> Iterator[Load]:
    """End the load whatever happens."""
    try:
        yield load
    finally:
        with contextlib.suppress(RuntimeError):
            load.close()


def main() -> int:
    """Print the figures for the committed windows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scrape", type=int, default=15, help="scrape and evaluation, seconds")
    parser.add_argument("--settle", type=float, default=60.0, help="healthy seconds before")
    parser.add_argument("--breach", type=float, default=180.0, help="seconds of breach, at least")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, VllmServer(knobs=True) as engine:
        directory = Path(name)
        (directory / "stack").mkdir()
        with (
            product_with_spec(directory / "product", engine) as product,
            Stack(
                directory / "stack",
                rule_files=rule_files(directory, RuleSettings()),
                alertmanager_yaml=compile_alertmanager(),
                scrape_seconds=arguments.scrape,
            ) as stack,
            running(Load(engine.url)) as load,
        ):
            wait_for(lambda: product.source_states()["plugin"] in ("ok", "idle"), 30)
            timing = breach_and_recover(
                stack,
                product,
                load,
                settle=arguments.settle,
                breach=arguments.breach,
                patience=900.0,
            )
            errors = stack.rule_errors()
            tickets = stack.receiver.notifications("ticket")
    sys.stdout.write(
        f"real vLLM, scrape {arguments.scrape} s, breach {arguments.breach:g} s, "
        f"{load.sent} requests: page after {timing.page_seconds:.0f} s, resolved "
        f"{timing.resolve_seconds:.0f} s after the end, {len(timing.pages)} notifications of "
        f"{len({p.group_key for p in timing.pages})} incident(s), {len(tickets)} tickets, "
        f"rule errors: {errors or 'none'}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

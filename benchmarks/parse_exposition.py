"""Parsing speed: our exposition parser against prometheus_client's, in one run.

``python benchmarks/parse_exposition.py [--json]`` reads a vLLM exposition of 3,000 lines (the
captured one, its ranks multiplied) whose numbers change from scrape to scrape, as a sidecar does.
Ours is measured from the second scrape on; both take the same texts in turn, and the ratio is of
the medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from servoscope.exporters.exposition import TextParser
from servoscope.exporters.vllm.parse import Parser

LINES = 3_000
ROUNDS = 15
CAPTURED = (
    Path(__file__).parent.parent / "tests/fixtures/engines/vllm/0.32.0/metrics_under_load.txt"
)
_NUMBER = re.compile(r" ([0-9.e+-]+)$")


def exposition(captured: str, lines: int, scrape: int) -> str:
    """``captured`` with more ranks, and counters that have moved on by ``scrape``."""
    source = captured.splitlines()
    out = list(source)
    rank = 1
    while len(out) < lines:
        marked = [x.replace('engine="0"', f'engine="{rank}"') for x in source if 'engine="0"' in x]
        out += marked[: lines - len(out)]
        rank += 1
    moved = [
        x if x.startswith("#") else _NUMBER.sub(lambda m: f" {float(m[1]) + scrape}", x)
        for x in out
    ]
    return "\n".join(moved) + "\n"


def seconds(read: Callable[[str], object], text: str) -> float:
    start = time.perf_counter()
    read(text)
    return time.perf_counter() - start


def client_families(text: str) -> object:
    return list(text_string_to_metric_families(text))


def measure() -> dict[str, float]:
    captured = CAPTURED.read_text(encoding="utf-8")
    texts = [exposition(captured, LINES, scrape) for scrape in range(ROUNDS + 1)]
    ours, whole = TextParser(), Parser("0.32.0")
    first = seconds(ours.parse, texts[0])
    whole.parse(texts[0])
    client: list[float] = []
    text: list[float] = []
    sample: list[float] = []
    for body in texts[1:]:
        client.append(seconds(client_families, body))
        text.append(seconds(ours.parse, body))
        sample.append(seconds(whole.parse, body))
    return {
        "lines": float(texts[0].count("\n")),
        "prometheus_client_ms": 1e3 * statistics.median(client),
        "first_ms": 1e3 * first,
        "later_ms": 1e3 * statistics.median(text),
        "to_sample_ms": 1e3 * statistics.median(sample),
        "ratio": statistics.median(client) / statistics.median(text),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures))
    else:
        print(
            f"{figures['lines']:.0f} lines: prometheus_client "
            f"{figures['prometheus_client_ms']:.1f} ms, ours first {figures['first_ms']:.1f} ms, "
            f"then {figures['later_ms']:.2f} ms ({figures['ratio']:.1f} x faster), text to "
            f"vLLM sample {figures['to_sample_ms']:.2f} ms"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

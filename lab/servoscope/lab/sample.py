"""The trace sample shipped with the product: the first 174 s of Mooncake's conversation trace.

``python -m servoscope.lab.sample SOURCE TARGET`` made it (traces/README.md says from what). Block
ids that occur once in the sample are left out: nothing shares them, and they are most of the bytes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from importlib.resources import as_file, files
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from servoscope.lab.trace import Refusals, TraceError, TraceRequest, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["load_sample", "main", "reduced"]

SAMPLE = "sample.jsonl"
SECONDS = 174.0


def load_sample() -> list[TraceRequest]:
    """The shipped sample, in order of arrival. Raises TraceError when a line of it is damaged."""
    refusals = Refusals()
    with as_file(files("servoscope.lab") / "traces" / SAMPLE) as path:
        requests = list(read_trace(path, refusals))
    if refusals.total or not requests:
        raise TraceError(f"the shipped {SAMPLE} is damaged: {refusals.first or 'empty'}")
    return requests


def reduced(requests: Iterable[TraceRequest], seconds: float) -> Iterator[TraceRequest]:
    """The first ``seconds``, each prefix cut at its first block that no other request has."""
    kept = list(takewhile(lambda r: r.arrival_seconds < seconds, requests))
    uses = Counter(block for request in kept for block in set(request.prefix or ()))
    for request in kept:
        shared = takewhile(lambda block: uses[block] > 1, request.prefix or ())
        yield TraceRequest(
            request.arrival_seconds, request.prompt_tokens, request.output_tokens, tuple(shared)
        )


def main(argv: list[str] | None = None) -> int:
    """Cut a sample out of a trace and write it in Mooncake's form."""
    parser = argparse.ArgumentParser(prog="servoscope.lab.sample", description=main.__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args(argv)
    with options.target.open("wb") as file:
        for request in reduced(read_trace(options.source), options.seconds):
            line = {
                "timestamp": round(request.arrival_seconds * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.prefix,
            }
            file.write(orjson.dumps(line) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

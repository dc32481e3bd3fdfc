"""How long from a breach to its page, and from its end to the resolution. Run it as a program:

    python -m stack.page_timing            (in tests/; the committed rules; about 8 minutes)

The rules and routes are the committed ones with their real windows; only the receiver is ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from stack.exporter import Exporter
from stack.harness import Stack
from stack.receiver import Notification

__all__ = ["Timing", "time_a_page"]


@dataclass(frozen=True)
class Timing:
    """Seconds from the breach to its first page, and from its end to the resolved notification."""

    page_seconds: float
    resolve_seconds: float
    pages: list[Notification]


def time_a_page(
    stack: Stack, exporter: Exporter, *, settle: float, breach: float, patience: float
) -> Timing:
    """Healthy for ``settle`` seconds, a breach of at least ``breach``, then healthy again."""
    stack.set_targets("servoscope-sidecar", [exporter.address])
    stack.wait(lambda: stack.query("servoscope:slo_events:rate5m"), patience, "the first rates")
    time.sleep(settle)
    assert not stack.receiver.notifications(), "something paged before the breach"
    began = time.time()
    exporter.set_slow(1.0)
    page = stack.wait(lambda: stack.receiver.notifications("page"), patience, "a page")[0]
    time.sleep(max(0.0, breach - (time.time() - began)))
    ended = time.time()
    exporter.set_slow(0.0)

    def resolved() -> Notification | None:
        last = stack.receiver.notifications("page")[-1]
        return last if last.status == "resolved" else None

    last = stack.wait(resolved, patience, "the end of the page")
    assert last is not None
    return Timing(
        page_seconds=page.at_unix_seconds - began,
        resolve_seconds=last.at_unix_seconds - ended,
        pages=stack.receiver.notifications("page"),
    )


def main() -> int:
    """Print the two figures for the committed rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scrape", type=int, default=15, help="scrape and evaluation, seconds")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--settle", type=float, default=60.0, help="healthy seconds before")
    parser.add_argument("--breach", type=float, default=240.0, help="seconds of breach, at least")
    arguments = parser.parse_args()
    exporter = Exporter("ttft", arguments.rate)
    exporter.start()
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            Stack(Path(directory), scrape_seconds=arguments.scrape) as stack,
        ):
            timing = time_a_page(
                stack,
                exporter,
                settle=arguments.settle,
                breach=arguments.breach,
                patience=900.0,
            )
            errors = stack.rule_errors()
    finally:
        exporter.end()
    sys.stdout.write(
        f"scrape {arguments.scrape} s, {arguments.rate:g} requests/s, "
        f"breach {arguments.breach:g} s: page after {timing.page_seconds:.0f} s, "
        f"resolved {timing.resolve_seconds:.0f} s after the end, "
        f"{len({p.group_key for p in timing.pages})} incident(s), "
        f"{len(timing.pages)} notification(s), rule errors: {errors or 'none'}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

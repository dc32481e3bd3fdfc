"""Builds what the real-engine tests need, so that it is there when the first of them begins.

``python -m engines.ready_made`` with ``tests`` on the path; ``tests/conftest.py`` runs it beside
the tests that need no engine. It takes the harnesses' own locks: a test that comes too early waits,
and one that finds nothing (a build failed here) builds again and tells what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines import sglang_cpu, vllm_cpu
from engines.process import EngineError

__all__ = ["main"]

#: In the order in which the suite comes to them.
WANTED: tuple[Callable[[], Path], ...] = (
    vllm_cpu.environment,
    vllm_cpu.model,
    sglang_cpu.environment,
    sglang_cpu.model,
)


def main() -> int:
    """Exit code: how many could not be made."""
    failed = 0
    for make in WANTED:
        try:
            print(make(), flush=True)
        except EngineError as error:
            failed += 1
            print(error, flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

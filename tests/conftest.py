"""For the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engines.vllm_cpu import ONE_CORE, VllmServer

# No test may fail because the machine was busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Where the suite runs in the background, it inherits SIGINT ignored, and so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Fewer tests than this give no time to build an engine's environment in.
_WORTH_A_BUILD = 500
_TESTS = Path(__file__).parent
_BUILD = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines come last: their environments are built while the others run."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build them."""
    others = sum(item.get_closest_marker("engine") is None for item in session.items)
    if session.config.option.collectonly or not _WORTH_A_BUILD <= others < len(session.items):
        return
    session.config.stash[_BUILD] = subprocess.Popen(
        [sys.executable, "-m", "engines.ready_made"],
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What thousands of tests have left is not looked through while a client here keeps time.

    A full collection over all of it stops this process for a fifth of a second, again and again.
    """
    if item.get_closest_marker("engine") is not None:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def plain_vllm() -> Iterator[VllmServer]:
    """A real vLLM that was started with nothing of ours in it; idle between the files that use it.

    A start is half a minute, and nothing of one file stays in it for the next.
    """
    with VllmServer(plugin=False, env=ONE_CORE) as server:
        yield server


def pytest_sessionfinish(session: pytest.Session) -> None:
    """It ends with the suite, however that ends."""
    build = session.config.stash.get(_BUILD, None)
    if build is not None and build.poll() is None:
        os.killpg(build.pid, signal.SIGTERM)
        build.wait(timeout=30)

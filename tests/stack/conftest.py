from __future__ import annotations

from collections.abc import Iterator

import pytest

from stack.exporter import Exporter


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """A sidecar of hand-made counters: 20 requests a second on objective ttft, all in time."""
    made = Exporter("ttft", 20.0)
    made.start()
    yield made
    made.end()

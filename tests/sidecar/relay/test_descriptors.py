"""The limit on descriptors is raised, and the relay stays within it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from servoscope.sidecar.relay.descriptors import RESERVED, WANTED, relay_connections

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from servoscope.sidecar.relay.descriptors import raise_limit
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 512, 512), (512, 512, 512), (256, 10_000, WANTED), (9_000, 10_000, 9_000)],
)
def test_the_soft_limit_is_raised_and_never_lowered(soft: int, hard: int, expected: int) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.split() == [str(expected), str(expected)]


@pytest.mark.parametrize("limit", [0, 64, 256, 1_024, 4_096, WANTED, 10**9])
def test_relayed_and_refused_connections_fit(limit: int) -> None:
    connections = relay_connections(limit)
    assert 1 <= connections <= 1_024
    assert connections == 1 or RESERVED + 3 * connections <= limit
    assert relay_connections(WANTED) == 1_024

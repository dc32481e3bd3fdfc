"""The digest of objectives: the promise and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from servoscope.alerts.digest import digest
from servoscope.alerts.spec import Disconnects, Objective, Sli, default_spec

OBJECTIVES = tuple(default_spec().objectives)
TTFT = Objective(
    service="chat",
    name="ttft",
    sli=Sli.TIME_TO_FIRST_TOKEN,
    threshold_seconds=2.0,
    target_ratio=0.99,
    window_seconds=30 * 86_400,
    where={"tenant": ("b", "a")},
)


def test_the_digest_names_the_promise_and_not_its_order_or_its_words() -> None:
    assert re.fullmatch("[0-9a-f]{16}", digest(OBJECTIVES))
    assert digest(OBJECTIVES) == digest(tuple(reversed(OBJECTIVES)))
    assert digest([TTFT]) == digest(
        [replace(TTFT, description="else", where={"tenant": ("a", "b")})]
    )


def test_every_part_of_the_promise_counts() -> None:
    changes: list[Callable[[Objective], Objective]] = [
        lambda o: replace(o, service="other"),
        lambda o: replace(o, name="other"),
        lambda o: replace(o, sli=Sli.E2E),
        lambda o: replace(o, threshold_seconds=3.0),
        lambda o: replace(o, target_ratio=0.95),
        lambda o: replace(o, window_seconds=7 * 86_400),
        lambda o: replace(o, where={"tenant": ("a",)}),
        lambda o: replace(o, disconnects=Disconnects.BAD),
    ]
    digests = {digest([]), digest([TTFT]), *(digest([change(TTFT)]) for change in changes)}
    assert len(digests) == 2 + len(changes)


def test_the_digest_is_the_same_in_every_process_and_version() -> None:
    assert digest([TTFT]) == "05743238fc4a2d9e"

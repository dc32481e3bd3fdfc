"""``servoscope inspect`` as text: what the collector's policy is, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from servoscope.cli.commands.inspect import text
from servoscope.sidecar.control.policy_poll import AskError, PolicyPoll

NOW = 1_800_000_000.0
POLICY = b'{"control_mode": "%s", "slo_digest": "%s", "drift_freeze": %s}'


class Collector:
    """Says what it is told to, or fails."""

    def __init__(self) -> None:
        self.says: bytes | None = None

    async def __call__(self) -> bytes:
        if self.says is None:
            raise AskError("connection", "nobody there")
        return self.says


async def shown(*answers: bytes | None, obeyed: bool = False, asked: bool = True) -> list[str]:
    """The policy's lines, 12 s after the first answer."""
    collector = Collector()
    poll = PolicyPoll(
        collector if asked else None, "aa11",
        obeyed=obeyed, interval_seconds=20.0, clock=lambda: NOW,
    )  # fmt: skip
    for collector.says in answers:
        await poll.once(collector)
    return policy_lines({"policy": poll.view.as_json(), "sidecar": "http://127.0.0.1:9790"})


def policy_lines(payload: dict[str, Any]) -> list[str]:
    lines = text(payload, NOW + 12.0).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("policy "))
    return lines[first:]


async def test_a_good_policy_is_one_line_with_mode_and_age() -> None:
    assert await shown(POLICY % (b"observe", b"aa11", b"false")) == [
        "policy     ok  control mode observe, the same objectives, heard 12 s ago"
    ]


async def test_other_objectives_are_named_with_both_digests() -> None:
    first, second = await shown(POLICY % (b"on", b"bb22", b"false"))
    assert first == "policy     ok  control mode on, other objectives, heard 12 s ago"
    assert second.startswith("           the collector judges by other objectives (digest bb22)")
    assert "(aa11)" in second


async def test_a_collector_that_went_away_leaves_its_last_policy_and_its_age() -> None:
    first, second = await shown(POLICY % (b"on", b"aa11", b"false"), None)
    assert first == "policy     failed  control mode on, the same objectives, heard 12 s ago"
    assert "nobody there; the last policy stands" in second


async def test_what_refuses_knobs_is_said_only_where_it_is_obeyed() -> None:
    frozen = POLICY % (b"on", b"aa11", b"true")
    first, second = await shown(frozen, obeyed=True)
    assert "control mode on, frozen by a drift," in first
    assert second.strip() == "the collector's policy freezes control until a drift is over"
    assert len(await shown(frozen)) == 1


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ((None,), "policy     failed  the collector does not tell: nobody there"),
        ((b"[]",), "policy     bad_value  not a policy: body: no JSON object"),
        ((), "policy     idle  not asked yet"),
    ],
)
async def test_without_a_policy_it_says_why(answers: tuple[bytes | None, ...], line: str) -> None:
    assert await shown(*answers) == [line]


async def test_without_a_collector_or_a_sidecar_it_says_so() -> None:
    assert await shown(asked=False) == ["policy     off  no collector is configured"]
    assert policy_lines({"policy": None}) == ["policy     nobody asks for it: a sidecar would"]


def test_a_clock_that_was_set_back_makes_no_negative_age() -> None:
    policy = {"state": "ok", "control_mode": "on", "last_success_unix_seconds": NOW + 99.0}
    assert policy_lines({"policy": policy})[0].endswith("heard 0 s ago")


def test_without_a_sidecar_the_next_step_is_named() -> None:
    assert "sidecar    none attached; attach one:  servoscope sidecar http://h:1\n" in text(
        {"url": "http://h:1"}
    )

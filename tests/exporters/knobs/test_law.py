from __future__ import annotations

import math
from typing import Any

import pytest

from servoscope.exporters.knobs.bounds import KnobRefusedError
from servoscope.exporters.knobs.law import MAX_LEASE_SECONDS, KnobLaw, LeaseError
from servoscope.exporters.vllm.knob_set import KnobEnvelope, KnobSet

BOOT = KnobSet(2048, 0, 64)


def test_one_bad_value_changes_nothing() -> None:
    law = KnobLaw(KnobEnvelope(boot=BOOT))
    law.lease("me", 30, 0.0)
    with pytest.raises(KnobRefusedError):
        law.set("me", {"chunk_tokens": 256, "max_running_requests": 999}, 1.0, 0)
    assert law.target.values == BOOT


def test_lease_runs_out_after_30_seconds_unless_renewed() -> None:
    law = KnobLaw(KnobEnvelope(boot=BOOT))
    assert law.lease("me", 3600, 0.0) == MAX_LEASE_SECONDS
    law.set("me", {"chunk_tokens": 256}, 1.0, 0)
    law.renew("me", 20.0)
    assert law.target.deadline == 50.0
    assert law.target.live(49.9)
    assert not law.target.live(50.0)  # the engine's thread sees it without the socket's thread
    assert not law.expire(49.9)
    assert law.expire(50.0)
    assert law.target.values == BOOT
    assert law.target.deadline is None
    assert law.expired_total == 1
    with pytest.raises(LeaseError, match="no lease"):
        law.set("me", {"chunk_tokens": 256}, 51.0, 0)


def test_only_the_holder_sets_and_anybody_may_follow_him() -> None:
    law = KnobLaw(KnobEnvelope(boot=BOOT))
    law.lease("me", 10, 0.0)
    with pytest.raises(LeaseError, match=r"held by me for another 7\.0 s"):
        law.lease("you", 10, 3.0)
    with pytest.raises(LeaseError, match="held by me"):
        law.set("you", {"chunk_tokens": 256}, 3.0, 0)
    law.set("me", {"chunk_tokens": 256}, 3.0, 0)
    law.lease("me", 10, 8.0)  # a restarted owner takes its own lease over, settings stay
    assert law.target.values.chunk_tokens == 256
    assert law.target.deadline == 18.0
    law.lease("you", 10, 18.0)
    assert law.target.values == BOOT
    assert law.holder(19.0) == ("you", 9.0)
    law.release("you", 20.0)
    assert law.holder(20.0) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, 10**400, "30", None])
def test_a_lease_of_no_time_that_can_be_is_refused(odd: Any) -> None:
    with pytest.raises(LeaseError, match="ttl_s: not a finite number"):
        KnobLaw(KnobEnvelope(boot=BOOT)).lease("me", odd, 0.0)


def test_release_and_bypass() -> None:
    law = KnobLaw(KnobEnvelope(boot=BOOT))
    law.lease("me", 10, 0.0)
    law.bypass("me", True, 1.0)
    assert law.target.bypass
    assert law.target.deadline == 10.0
    law.bypass("me", False, 2.0)
    law.set("me", {"max_running_requests": 4}, 2.0, 0)
    law.release("me", 3.0)
    assert law.target.values == BOOT
    assert not law.target.bypass


@pytest.mark.parametrize("ttl", [float("nan"), float("inf"), "soon", None])
def test_a_nonsense_lease_is_refused(ttl: object) -> None:
    with pytest.raises(LeaseError, match="ttl_s"):
        KnobLaw(KnobEnvelope(boot=BOOT)).lease("me", ttl, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("owner", ["", "x" * 201])
def test_an_owner_has_a_name(owner: str) -> None:
    with pytest.raises(LeaseError, match="owner"):
        KnobLaw(KnobEnvelope(boot=BOOT)).lease(owner, 10, 0.0)

"""Asks the collector for its policy again and again; without a collector the last one stands."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from servoscope.exporters.records import SourceState
from servoscope.sidecar.attach.unanswered import reason_of
from servoscope.sidecar.control.policy import Policy, PolicyError, parse_policy

__all__ = ["Ask", "AskError", "PolicyPoll", "PolicyView", "ask_collector"]

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_MAX_BYTES = 64 * 1024
_SPREAD = 0.25  # sidecars that started together must not ask together

Ask = Callable[[], Awaitable[bytes]]


class AskError(Exception):
    """No policy came: a short ``reason`` for the counter, and words."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def ask_collector(session: aiohttp.ClientSession, collector_url: str, token: str = "") -> Ask:
    """One bounded GET of ``collector_url``/api/v1/policy; raises AskError."""
    url = collector_url.rstrip("/") + "/api/v1/policy"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)

    async def ask() -> bytes:
        body = bytearray()
        try:
            async with session.get(
                url, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise AskError(f"http_{answer.status}", f"HTTP {answer.status}")
                async for piece in answer.content.iter_chunked(8_192):
                    body += piece
                    if len(body) > _MAX_BYTES:
                        raise AskError("too_large", f"more than {_MAX_BYTES} bytes")
        except TimeoutError:
            raise AskError("timeout", f"no whole answer in {_ANSWER_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AskError(
                "connection",
                f"nothing answers at {collector_url} ({reason_of(error)}); start it: servoscope "
                "collector, or name another: --collector URL, or none: --collector off",
            ) from None
        return bytes(body)

    return ask


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What is known now, for /metrics and inspect."""

    state: SourceState
    detail: str
    policy: Policy | None
    last_success_unix_seconds: float | None
    slo_mismatch: bool | None  # None: no policy was heard
    refuses_knobs: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        policy = self.policy
        return {
            "state": self.state.value,
            "detail": self.detail,
            "control_mode": policy.control_mode if policy else None,
            "slo_digest": policy.slo_digest if policy else None,
            "drift_freeze": policy.drift_freeze if policy else None,
            "last_success_unix_seconds": self.last_success_unix_seconds,
            "slo_mismatch": self.slo_mismatch,
            "refuses_knobs": self.refuses_knobs,
        }


class PolicyPoll:
    """``obeyed``: whether knobs are refused where the policy says so. ``own_digest``: of the
    objectives by which this sidecar judges."""

    def __init__(
        self,
        ask: Ask | None,
        own_digest: str,
        *,
        obeyed: bool,
        interval_seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._ask = ask
        self.own_digest = own_digest
        self._obeyed = obeyed
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._policy: Policy | None = None
        self._heard_at: float | None = None  # by the wall clock, to be published
        self._state = SourceState.OFF if ask is None else SourceState.IDLE
        self._detail = "no collector is configured" if ask is None else "not asked yet"
        self.errors: Counter[str] = Counter()

    @property
    def refuses_knobs(self) -> str:
        """Why no knob may be set now, in words; empty when the policy does not stand against it."""
        if self._policy is None or not self._obeyed:
            return ""
        return self._policy.refuses_knobs

    @property
    def view(self) -> PolicyView:
        """What is known now."""
        policy, mismatch, detail = self._policy, None, self._detail
        if policy is not None:
            mismatch = policy.slo_digest != self.own_digest
            if mismatch:
                differs = (
                    f"the collector judges by other objectives (digest {policy.slo_digest}) than "
                    f"this sidecar ({self.own_digest}): give both the same slos"
                )
                detail = f"{detail}; {differs}" if detail else differs
        return PolicyView(
            state=self._state,
            detail=detail,
            policy=policy,
            last_success_unix_seconds=self._heard_at,
            slo_mismatch=mismatch,
            refuses_knobs=self.refuses_knobs,
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        while self._ask is not None:
            await self.once(self._ask)
            spread = 1 + _SPREAD * (2 * self._chance() - 1)
            await self._sleep(self._interval_seconds * spread)
        await asyncio.Event().wait()  # nobody to ask

    async def once(self, ask: Ask) -> None:
        """One question; a fault leaves the last good policy in force."""
        try:
            found = parse_policy(await ask())
        except AskError as error:
            self._fault(SourceState.FAILED, error.reason, f"the collector does not tell: {error}")
            return
        except PolicyError as error:
            self._fault(SourceState.BAD_VALUE, "bad_value", f"not a policy: {error}")
            return
        if found != self._policy:
            log.info("policy of the collector: %s", found)
        self._policy, self._heard_at = found, self._clock()
        self._state, self._detail = SourceState.OK, ""

    def _fault(self, state: SourceState, reason: str, detail: str) -> None:
        if self._policy is not None:
            detail += "; the last policy stands"
        self._state, self._detail = state, detail
        self.errors[reason] += 1

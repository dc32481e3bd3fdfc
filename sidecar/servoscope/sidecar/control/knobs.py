"""Knobs of the engine: read, set under a lease, given back. One holder: this sidecar.

The plug-in in the engine owns the bounds and the lease and reverts by itself when the lease is not
renewed; here we ask, renew in the background while something is set, and write down who wanted
what before and after. What cannot be written down is not changed. After a restart of the engine
or of the sidecar nothing is set again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servoscope.exporters.knobs.client import KnobRefused
from servoscope.exporters.knobs.reading import KnobState
from servoscope.exporters.plugin.hello import ProtocolError
from servoscope.exporters.records import Knob
from servoscope.sidecar.config import ControlConfig
from servoscope.sidecar.control.audit import AuditError, AuditLog
from servoscope.sidecar.control.kinds import (
    OBSERVE_ONLY,
    Connect,
    KnobKind,
    KnobRanks,
    knob_kind,
    with_boot_values,
)

__all__ = ["ControlError", "KnobControl"]

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_MAX_KNOBS = 32
_MAX_TEXT = 200
_MAX_VALUE = 1e15  # of any knob; whole numbers are exact up to there
_LINK_FAULTS = (OSError, TimeoutError, ProtocolError)  # the engine is away, or answers nonsense


class ControlError(Exception):
    """A request that was not done: HTTP status and the reason in words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KnobControl:
    """``find`` lists the knob sockets of the engine as it is now.

    ``forbidden`` says why nothing may be set now, or is empty; what is set already stays, and can
    always be given back. ``boot_values`` are those of knobs that nobody steers, where the engine
    tells them otherwise.
    """

    def __init__(
        self,
        config: ControlConfig,
        audit: AuditLog,
        server: str,
        find: Callable[[], Sequence[Path]],
        *,
        engine: str = "vllm",
        clock: Callable[[], float],
        steady: Callable[[], float] = time.monotonic,
        connect: Connect | None = None,
        version: Callable[[], str | None] = lambda: None,
        forbidden: Callable[[], str] = lambda: "",
        boot_values: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._config = config
        self._audit = audit
        self._server = server
        self._find = find
        self._engine = engine
        self._clock = clock
        self._steady = steady
        self._connect = connect or (self._kind.connect if self._kind else None)
        self._version = version
        self._forbidden = forbidden
        self._boot_values = boot_values
        self._ranks: KnobRanks | None = None
        self._paths: tuple[Path, ...] = ()
        self._lock = asyncio.Lock()
        self.held = False
        self._renewed_at = 0.0  # by the monotonic clock
        self.detail = ""  # why the last read of the knobs failed, in words
        self.results: Counter[tuple[str, str]] = Counter()  # (knob, result)

    @property
    def _kind(self) -> KnobKind | None:
        return knob_kind(self._engine)

    @property
    def why(self) -> str:
        """Why no knob can be set, in words; empty when that is possible."""
        if self._kind is None:
            return OBSERVE_ONLY.format(self._engine)
        if self._ranks is None:
            return self.detail or self._kind.why_none(self._version())
        return self._forbidden()

    async def run(self) -> None:
        """Renew the lease while it is held, until cancelled."""
        while True:
            await asyncio.sleep(self._config.renew_seconds)
            if self.held:
                await self._renew()

    async def states(self) -> Sequence[KnobState]:
        """State of every rank now; empty when the engine has no knobs, or they do not answer."""
        async with self._lock:
            return await self._states()

    async def knobs(self) -> list[Knob]:
        """The knobs over all ranks; those that need a restart when none is live."""
        states = await self.states()
        if self._kind is None:
            return []
        return with_boot_values(self._kind.describe(states), self._boot_values())

    async def set(self, values: Mapping[str, Any], actor: str) -> dict[str, float]:
        """Set knobs on all ranks, or none. Returns what is in force, as read back.

        Raises ControlError: 400 for a bad request, 404 without knobs, 409 when the collector's
        policy forbids it or somebody else holds the lease, 422 for a value that the engine refuses,
        503 when it cannot be written down.
        """
        wanted = _checked(values)
        if why := self._forbidden():
            self._count(wanted, "refused")
            entry = {"action": "set", "asked": wanted, "result": "refused", "why": why}
            self._write(actor, entry, late=True)
            raise ControlError(409, why)
        async with self._lock:
            states = await self._states()
            kind = self._kind
            if not states or kind is None:
                raise ControlError(404, self.why)
            before = {k.name: k.value for k in kind.describe(states)}
            entry = {"action": "set", "asked": wanted, "before": before}
            self._write(actor, {**entry, "result": "begin"})
            try:
                applied = await self._apply(wanted, before)
            except ControlError as error:
                self._count(wanted, "refused")
                self._write(actor, {**entry, "result": "refused", "why": str(error)}, late=True)
                raise
            self._count(wanted, "applied")
            self._write(actor, {**entry, "result": "applied", "after": applied}, late=True)
            return applied

    async def release(self, actor: str) -> None:
        """Give the lease back: the engine reverts to its boot values at once.

        Without a lease there is nothing to do. Raises ControlError 404 without knobs.
        """
        async with self._lock:
            if self.held:
                await self._release(actor)
            elif not await self._states():
                raise ControlError(404, self.why)

    async def _release(self, actor: str) -> None:
        self._write(actor, {"action": "release", "result": "begin"})
        result = "released"
        try:
            ranks = await self._connected()
            async with asyncio.timeout(_ANSWER_SECONDS):
                await ranks.release()
        except (*_LINK_FAULTS, KnobRefused) as error:
            result = f"not released ({error}): the engine reverts when the lease runs out"
            await self._drop()
        self.held = False
        self._write(actor, {"action": "release", "result": result}, late=True)

    async def engine_restarted(self) -> None:
        """A new engine has its boot values and no lease of ours."""
        async with self._lock:
            await self._drop()
            if self.held:
                self.held = False
                self.results["all", "reverted"] += 1
                entry = {"action": "engine restarted", "result": "boot values"}
                self._write("sidecar", entry, late=True)

    async def aclose(self) -> None:
        """Release what is held and close."""
        async with self._lock:
            if self.held:
                await self._release("sidecar (ending)")
            await self._drop()

    async def _states(self) -> Sequence[KnobState]:
        if not self._find():
            await self._drop()
            self.detail = ""
            return ()
        try:
            ranks = await self._connected()
            async with asyncio.timeout(_ANSWER_SECONDS):
                states = await ranks.get()
        except (*_LINK_FAULTS, KnobRefused) as error:
            self.detail = f"the engine's knobs do not answer: {_words(error)}"
            await self._drop()
            return ()
        self.detail = ""
        return list(states)

    async def _connected(self) -> KnobRanks:
        paths = tuple(self._find())
        if self._ranks is not None and paths == self._paths:
            return self._ranks
        await self._drop()
        if not paths or self._connect is None:
            raise FileNotFoundError("the engine has no knob socket")
        async with asyncio.timeout(_ANSWER_SECONDS):
            self._ranks = await self._connect(paths)
        self._paths = paths
        if self.held:  # the connection was lost, not the lease: take it over again
            await self._ranks.lease(self._config.owner, self._config.lease_seconds)
        return self._ranks

    async def _apply(
        self, values: Mapping[str, float], before: Mapping[str, float | None]
    ) -> dict[str, float]:
        """What was asked for, and what the engine changed with it, as read back."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                ranks = await self._leased()
                try:
                    applied = await ranks.set(values)
                except KnobRefused as error:
                    raise ControlError(422, str(error)) from error
                self.held = True
        except _LINK_FAULTS as error:
            await self._drop()
            raise ControlError(503, f"the engine did not answer: {_words(error)}") from error
        finally:
            if not self.held and self._ranks is not None:
                with contextlib.suppress(KnobRefused, *_LINK_FAULTS):
                    await self._ranks.release()  # nothing was set: keep no lease
        told = {n: min(rank[n] for rank in applied if n in rank) for rank in applied for n in rank}
        return {n: v for n, v in told.items() if n in values or before.get(n) not in (None, v)}

    async def _leased(self) -> KnobRanks:
        try:
            ranks = await self._connected()
            if not self.held:
                await ranks.lease(self._config.owner, self._config.lease_seconds)
                self._renewed_at = self._steady()
        except KnobRefused as error:
            raise ControlError(409, str(error)) from error
        return ranks

    async def _renew(self) -> None:
        async with self._lock:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await (await self._connected()).renew()
                self._renewed_at = self._steady()
            except _LINK_FAULTS as error:
                await self._drop()
                if self._steady() - self._renewed_at > self._config.lease_seconds:
                    self._lost(f"not renewed in time: {_words(error)}")
            except KnobRefused as error:
                self._lost(str(error))

    def _lost(self, why: str) -> None:
        log.warning("the lease on the knobs of %s is lost: %s", self._server, why)
        self.held = False
        self.results["all", "reverted"] += 1
        self._write("sidecar", {"action": "lease lost", "result": why}, late=True)

    async def _drop(self) -> None:
        ranks, self._ranks, self._paths = self._ranks, None, ()
        if ranks is not None:
            try:
                await ranks.aclose()
            except OSError as error:
                log.debug("closing the knob sockets: %s", error)

    def _count(self, values: Mapping[str, float], result: str) -> None:
        for name in values:
            self.results[name, result] += 1

    def _write(self, actor: str, entry: Mapping[str, Any], *, late: bool = False) -> None:
        """``late``: the change is made already, so a full disk can only be shouted about."""
        who = {"actor": actor[:_MAX_TEXT], "server": self._server}
        try:
            self._audit.append({"at_unix_seconds": self._clock(), **who, **entry})
        except AuditError as error:
            if not late:
                raise ControlError(
                    503, f"no change was made, it cannot be written down: {error}"
                ) from error
            log.error("a change of knobs was made and could not be written down: %s", error)  # noqa: TRY400


def _checked(values: Mapping[str, Any]) -> dict[str, float]:
    if not values or len(values) > _MAX_KNOBS:
        raise ControlError(400, f"set: must name 1 to {_MAX_KNOBS} knobs")
    checked: dict[str, float] = {}
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # by comparison: isfinite() raises for whole numbers that no float can hold
        if not number or not -_MAX_VALUE <= value <= _MAX_VALUE:
            raise ControlError(400, f"set.{str(name)[:64]}: must be a number, not {value!r:.64}")
        checked[str(name)[:64]] = value
    return checked


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__

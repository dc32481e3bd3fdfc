"""Sidecar side of the knobs sockets: what can be set on this vLLM, setting it, reading it back.

``KnobClient`` talks to one engine core, ``KnobGroup`` to all ranks of a server: all acknowledge a
setting, or all get their old values back. ``describe`` turns states into the vocabulary's Knobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from servoscope.exporters.records import Knob, KnobMode
from servoscope.exporters.vllm.knob_state import KNOB_UNITS
from servoscope.exporters.vllm.lines import LineDecoder, encode_line
from servoscope.exporters.vllm.requests import Hello, ProtocolError, hello_from_message
from servoscope.exporters.vllm.sockets import connect, sockets_of

__all__ = [
    "RESTART_FLAGS",
    "KnobClient",
    "KnobGroup",
    "KnobRefused",
    "KnobState",
    "RankKnob",
    "describe",
    "find_knob_sockets",
]

ANSWER_SECONDS = 5.0
READ_BYTES = 65536

#: How each knob is set when the engine has to be restarted for it.
RESTART_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "chunk_tokens": "--max-num-batched-tokens",
        "long_prefill_threshold_tokens": "--long-prefill-token-threshold",
        "max_running_requests": "--max-num-seqs",
    }
)
NOT_WRAPPED = "the engine was not started with SERVOSCOPE_KNOBS=1 and the plug-in"


class KnobRefused(RuntimeError):  # noqa: N818 - the engine answered, it is no error of the link
    """The engine said no: value out of bounds, lease held by another, knob not live."""


@dataclass(frozen=True, slots=True)
class RankKnob:
    """One knob on one rank."""

    value: float
    boot: float
    minimum: float
    maximum: float
    why: str = ""  # not empty: cannot be set


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobState:
    """What one engine core says: knobs, lease, and the scheduler's counters since its boot."""

    rank: int
    knobs: Mapping[str, RankKnob]
    in_force: Mapping[str, int]  # the scheduler's attributes now; they follow at the next step
    lease_owner: str | None
    lease_seconds_left: float | None
    leases_expired_total: int
    bypass: bool
    off: str
    faults: int
    running: int
    waiting: int
    steps: int
    empty_steps: int
    held_steps: int
    scheduled_tokens: int
    step_tokens_max: int  # largest step since this client's last read
    scheduler_cpu_seconds: float
    plugin_cpu_seconds: float


def find_knob_sockets(run_dirs: Iterable[Path], pids: Iterable[int]) -> list[Path]:
    """Knobs sockets of these engine-core processes, all ranks."""
    return sockets_of(run_dirs, pids, "knobs-{pid}-dp*.sock")


def state_from_message(message: Mapping[str, Any]) -> KnobState:
    """Check a ``state`` answer. Raises ProtocolError naming the field."""
    where = "type"
    try:
        knobs: dict[str, RankKnob] = {}
        for name, said in message["knobs"].items():
            where = f"knobs.{name}"
            knobs[str(name)] = RankKnob(
                value=float(said["value"]),
                boot=float(said["boot"]),
                minimum=float(said["minimum"]),
                maximum=float(said["maximum"]),
                why=str(said.get("why", ""))[:300],
            )
        where = "lease"
        lease = message.get("lease") or {}
        where = "counters"
        return KnobState(
            rank=int(message["rank"]),
            knobs=knobs,
            in_force={str(k): int(v) for k, v in message.get("in_force", {}).items()},
            lease_owner=lease.get("owner"),
            lease_seconds_left=lease.get("seconds_left"),
            leases_expired_total=int(message["leases_expired_total"]),
            bypass=bool(message["bypass"]),
            off=str(message.get("off", ""))[:300],
            faults=int(message["faults"]),
            running=int(message["running"]),
            waiting=int(message["waiting"]),
            steps=int(message["steps"]),
            empty_steps=int(message["empty_steps"]),
            held_steps=int(message["held_steps"]),
            scheduled_tokens=int(message["scheduled_tokens"]),
            step_tokens_max=int(message["step_tokens_max"]),
            scheduler_cpu_seconds=float(message["scheduler_cpu_seconds"]),
            plugin_cpu_seconds=float(message["plugin_cpu_seconds"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"state: {where}: {error!r}"[:300]) from error


class KnobClient:
    """One engine core. Make it with ``await KnobClient.connect(path)``.

    Methods raise KnobRefused when the engine says no, ProtocolError when it answers nonsense,
    ConnectionError when it is gone, TimeoutError when it does not answer in ANSWER_SECONDS.
    """

    def __init__(
        self, path: Path, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.path = path
        self.hello = hello
        self._reader = reader
        self._writer = writer
        self._decoder = LineDecoder()
        self._ready: list[dict[str, Any]] = []
        self._one = asyncio.Lock()
        self._ident = 0
        self._broken = ""

    @classmethod
    async def connect(cls, path: Path) -> KnobClient:
        """Connect and check the hello. Raises OSError, ProtocolError."""
        peer = connect(path)
        peer.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=peer)
        client = cls(path, _NO_HELLO, reader, writer)
        try:
            first = await asyncio.wait_for(client._read(), ANSWER_SECONDS)
            client.hello = hello_from_message(first)
        except TimeoutError:
            await client.aclose()
            raise ProtocolError(f"no hello within {ANSWER_SECONDS:g} s") from None
        except BaseException:
            await client.aclose()
            raise
        return client

    async def get(self) -> KnobState:
        """Everything about this rank, now."""
        return state_from_message(await self._ask("state", op="get"))

    async def lease(self, owner: str, ttl_s: float = 30.0) -> float:
        """Take the lease; returns the seconds granted (30 at most)."""
        return float((await self._ask("leased", op="lease", owner=owner, ttl_s=ttl_s))["ttl_s"])

    async def renew(self) -> float:
        """Start the lease's time anew."""
        return float((await self._ask("leased", op="renew"))["ttl_s"])

    async def set(self, values: Mapping[str, float]) -> dict[str, float]:
        """Set knobs, all or nothing; returns the values the next step uses (read-back)."""
        answer = await self._ask("set", op="set", values=dict(values))
        applied = answer.get("applied")
        if not isinstance(applied, dict):
            raise ProtocolError("set: applied is missing")
        return {str(name): float(value) for name, value in applied.items()}

    async def release(self) -> None:
        """Give the lease back: boot values at once."""
        await self._ask("released", op="release")

    async def bypass(self, on: bool) -> None:
        """Let the wrapper pass straight through, to measure its cost."""
        await self._ask("bypassed", op="bypass", on=on)

    async def aclose(self) -> None:
        """Close. A lease that is held runs out by itself."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _ask(self, wanted: str, **request: Any) -> dict[str, Any]:
        async with self._one:
            if self._broken:
                raise ConnectionError(self._broken)
            self._ident += 1
            self._writer.write(encode_line({"id": self._ident, **request}))
            try:
                await self._writer.drain()
                answer = await asyncio.wait_for(self._answer(self._ident), ANSWER_SECONDS)
            except BaseException as error:
                # The next answer on this connection might be this question's: do not go on.
                self._broken = f"{self.path.name}: {error!r}"[:300]
                raise
        if answer.get("type") in ("refused", "error"):
            raise KnobRefused(str(answer.get("why", "no reason given"))[:500])
        if answer.get("type") != wanted:
            raise ProtocolError(f"answer is {answer.get('type')!r}, not {wanted}"[:200])
        return answer

    async def _answer(self, ident: int) -> dict[str, Any]:
        while True:
            message = await self._read()
            if message.get("id") == ident:
                return message

    async def _read(self) -> dict[str, Any]:
        while not self._ready:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionError(f"{self.path.name}: the engine closed the knobs socket")
            self._ready = self._decoder.feed(data)
            if self._decoder.garbage + self._decoder.oversize:
                raise ProtocolError(f"{self.path.name}: a line that is no JSON object")
        return self._ready.pop(0)


_NO_HELLO = Hello(
    protocol=0, version="", engine="", engine_version="", boot_id="", pid=0
)  # replaced by connect before anybody sees it


class KnobGroup:
    """All ranks of one server as one."""

    def __init__(self, clients: Sequence[KnobClient]) -> None:
        if not clients:
            raise ValueError("no engine cores")
        self.clients = tuple(clients)

    @classmethod
    async def connect(cls, paths: Iterable[Path]) -> KnobGroup:
        """Connect to all. Raises OSError, ProtocolError; then none stays open."""
        made: list[KnobClient] = []
        try:
            for path in paths:
                made.append(await KnobClient.connect(path))  # noqa: PERF401 - closed on error
            return cls(made)
        except BaseException:
            for client in made:
                await client.aclose()
            raise

    async def get(self) -> list[KnobState]:
        """The state of every rank, in order."""
        return list(await asyncio.gather(*(c.get() for c in self.clients)))

    async def lease(self, owner: str, ttl_s: float = 30.0) -> float:
        """Lease all ranks, or none. Returns the shortest time granted."""
        taken: list[KnobClient] = []
        try:
            granted = []
            for client in self.clients:
                granted.append(await client.lease(owner, ttl_s))
                taken.append(client)
        except BaseException:
            for client in taken:
                with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                    await client.release()
            raise
        return min(granted)

    async def renew(self) -> float:
        """Renew all. Raises as soon as one does not."""
        return min(await asyncio.gather(*(c.renew() for c in self.clients)))

    async def set(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Set all ranks; if one does not take it, the others get their old values back."""
        before = await self.get()
        done: list[tuple[KnobClient, dict[str, float]]] = []
        applied = []
        try:
            for client, state in zip(self.clients, before, strict=True):
                old = {n: state.knobs[n].value for n in values if n in state.knobs}
                # Noted first: a rank that did not answer may have taken the value all the same.
                done.append((client, old))
                applied.append(await client.set(values))
        except BaseException:
            await self._roll_back(done)
            raise
        return applied

    async def release(self) -> None:
        """Release all; the first error is raised after all were asked."""
        results = await asyncio.gather(*(c.release() for c in self.clients), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def aclose(self) -> None:
        """Close all."""
        for client in self.clients:
            await client.aclose()

    async def _roll_back(self, done: Sequence[tuple[KnobClient, dict[str, float]]]) -> None:
        """Old values to every rank asked so far; one that is out of reach reverts by its lease."""
        for client, old in done:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                await client.set(old)


def describe(states: Sequence[KnobState]) -> list[Knob]:
    """Every vLLM knob, over all ranks. Without states (no plug-in) what a restart could change.

    Bounds are the tightest over the ranks; a knob whose ranks differ has no single value and
    ``why`` says so.
    """
    return [_knob(name, unit, states) for name, unit in KNOB_UNITS.items()]


def _knob(name: str, unit: str, states: Sequence[KnobState]) -> Knob:
    ranks = [s.knobs[name] for s in states if name in s.knobs]
    off = next((s.off for s in states if s.off), "")
    if not ranks or off:
        flag = RESTART_FLAGS.get(name)
        return Knob(
            name=name,
            mode=KnobMode.RESTART if flag else KnobMode.OBSERVE,
            unit=unit,
            value=None,
            boot_value=None,
            minimum=None,
            maximum=None,
            why=(off or NOT_WRAPPED) + (f"; restart with {flag}" if flag else ""),
        )
    why = next((r.why for r in ranks if r.why), "")
    values = {r.value for r in ranks}
    if len(values) > 1:
        why = why or f"ranks differ: {', '.join(f'{v:g}' for v in sorted(values))}"
    refused = any(r.why for r in ranks)
    return Knob(
        name=name,
        mode=KnobMode.OBSERVE if refused else KnobMode.LIVE,
        unit=unit,
        value=values.pop() if len(values) == 1 else None,
        boot_value=min(r.boot for r in ranks),
        minimum=max(r.minimum for r in ranks),
        maximum=min(r.maximum for r in ranks),
        why=why or f"boot value {min(r.boot for r in ranks):g} is the ceiling",
    )

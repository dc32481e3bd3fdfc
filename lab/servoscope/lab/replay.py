"""Replay of a trace against an engine: its arrivals, lengths and shared prefixes, as scaled.

``plan_pass`` is pure; ``replay`` sends passes of it through run_open until it is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from servoscope.lab.client import Limits, check_target, run_open
from servoscope.lab.prompt import PromptMaker
from servoscope.lab.request import CHAT, Observed, PlannedRequest
from servoscope.lab.sample import load_sample
from servoscope.lab.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Progress", "Quadrants", "Scale", "plan_pass", "replay", "replay_sample"]

MIN_PASS_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadrants:
    """Where short ends and long begins, in the trace's own tokens (before any scale).

    The defaults are the medians of Mooncake's conversation trace.
    """

    prompt_tokens: int = 6912
    output_tokens: int = 350

    def request_type(self, request: TraceRequest) -> str:
        """chat, summarise, generate or rag."""
        if request.prompt_tokens < self.prompt_tokens:
            return "chat" if request.output_tokens < self.output_tokens else "generate"
        return "summarise" if request.output_tokens < self.output_tokens else "rag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What becomes of a trace. The defaults fit the embedded engine on two cores.

    Times are multiplied by ``arrival``, after each arrival was spread over ``spread_seconds`` (the
    trace's own rounding). Lengths are multiplied by ``prompt`` and ``output`` and then capped.
    """

    arrival: float = 1.5
    spread_seconds: float = 3.0
    prompt: float = 1 / 32
    output: float = 1 / 8
    max_prompt_tokens: int = 1600
    max_output_tokens: int = 160

    def __post_init__(self) -> None:
        for name in ("arrival", "prompt", "output", "max_prompt_tokens", "max_output_tokens"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is not above zero")
        if not 0 <= self.spread_seconds < float("inf"):
            raise ValueError(f"spread_seconds: {self.spread_seconds} is below zero")


@dataclass(slots=True)
class Progress:
    """What a replay has done so far: passes begun, requests ended, by outcome and type."""

    passes: int = 0
    ended: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    request_types: Counter[str] = field(default_factory=Counter)
    last_detail: str = ""  # of the last request that failed

    def add(self, seen: Observed) -> None:
        """Count one ended request."""
        self.ended += 1
        self.outcomes[seen.outcome.value if seen.sent else "not_sent"] += 1
        self.request_types[seen.request_type or ""] += 1
        if seen.outcome.value == "error":
            self.last_detail = seen.detail


def plan_pass(
    trace: Sequence[TraceRequest],
    scale: Scale,
    *,
    number: int = 0,
    seed: int = 0,
    quadrants: Quadrants | None = None,
    characters_per_token: float = 1.0,
    abort_share: float = 0.02,
    model: str | None = None,
    send_request_type: bool = True,
) -> list[PlannedRequest]:
    """Pass ``number`` over the trace, in order of arrival.

    Blocks that the trace shares are shared in every pass; the rest of each prompt is its own. A
    request without block ids shares the first quarter of its prompt with its type, every second
    one. ``abort_share`` of the requests are closed by the client after a few tokens.
    """
    kinds = quadrants or Quadrants()
    random = Random(f"{seed}/{number}")  # noqa: S311 - a plan that can be repeated, not a secret
    maker = PromptMaker(seed, characters_per_token)
    plan: list[PlannedRequest] = []
    for index, request in enumerate(trace):
        kind = kinds.request_type(request)
        spread = random.uniform(0.0, scale.spread_seconds)
        aborted = random.random() < abort_share
        plan.append(
            PlannedRequest(
                request_id=f"replay-{seed}-{number}-{index}",
                prompt=_prompt(maker, request, scale, kind, f"{number}/{index}"),
                endpoint=CHAT,  # one for all: another template in front would share no prefix
                max_tokens=_scaled(request.output_tokens, scale.output, scale.max_output_tokens),
                request_type=kind,
                send_request_type=send_request_type,
                arrival_seconds=(request.arrival_seconds + spread) * scale.arrival,
                abort_after_token_events=random.randint(2, 8) if aborted else None,
                temperature=0.8,
                seed=index,
                model=model,
            )
        )
    return sorted(plan, key=lambda planned: planned.arrival_seconds)


def _scaled(tokens: int, factor: float, most: int) -> int:
    return min(max(1, round(tokens * factor)), most)


def _prompt(maker: PromptMaker, request: TraceRequest, scale: Scale, kind: str, own: str) -> str:
    """Shared pieces first, as far as they fit, then the request's own."""
    tokens = _scaled(request.prompt_tokens, scale.prompt, scale.max_prompt_tokens)
    if request.prefix is None:
        quarter = tokens // 4 if own.endswith(("0", "2", "4", "6", "8")) else 0
        # One long piece a type, cut to length: what is shared is its beginning.
        shared = maker.text(f"type/{kind}", scale.max_prompt_tokens)
        pieces = shared[: round(quarter * maker.characters_per_token)]
    else:
        size = max(1, round(MOONCAKE_BLOCK_TOKENS * scale.prompt))
        blocks = request.prefix[: max(0, tokens - 1) // size]  # the last token is always its own
        pieces = "".join(maker.text(f"block/{block}", size) for block in blocks)
    left = tokens - round(len(pieces) / maker.characters_per_token)
    return pieces + maker.text(f"own/{own}", max(1, left))


async def replay(
    url: str,
    trace: Sequence[TraceRequest],
    scale: Scale | None = None,
    *,
    stop: asyncio.Event | None = None,
    passes: int | None = None,
    seed: int = 0,
    quadrants: Quadrants | None = None,
    abort_share: float = 0.02,
    model: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    limits: Limits | None = None,
    allow_remote: bool = False,
) -> Progress:
    """Send the trace again and again (or ``passes`` times) until ``stop`` is set.

    An engine that is away gives errors, counted, never an exception: the replay goes on and finds
    it again. Raises ValueError (RemoteTargetError) as run_open does, and for an empty trace.
    """
    check_target(url, allow_remote=allow_remote)
    if not trace:
        raise ValueError("trace: empty")
    stop = stop or asyncio.Event()
    scale = scale or Scale()
    progress = Progress()

    def ended(seen: Observed) -> None:
        progress.add(seen)
        if on_progress is not None:
            on_progress(progress)

    while not stop.is_set() and (passes is None or progress.passes < passes):
        plan = plan_pass(
            trace,
            scale,
            number=progress.passes,
            seed=seed,
            quadrants=quadrants,
            abort_share=abort_share,
            model=model,
        )
        progress.passes += 1
        begin = time.monotonic()
        longest = plan[-1].arrival_seconds + (limits or Limits()).request_seconds
        await run_open(
            url,
            plan,
            limits=limits or Limits(total_seconds=longest + 1.0),
            on_observed=ended,
            stop=stop,
            allow_remote=allow_remote,
        )
        # A short trace against an engine that is away must not spin.
        with contextlib.suppress(TimeoutError):
            pause = begin + MIN_PASS_SECONDS - time.monotonic()
            await asyncio.wait_for(stop.wait(), max(0.0, pause))
    return progress


async def replay_sample(
    url: str,
    *,
    stop: asyncio.Event | None = None,
    passes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Replay the sample that ships with the product, scaled for the embedded engine."""
    return await replay(url, load_sample(), stop=stop, passes=passes, on_progress=on_progress)

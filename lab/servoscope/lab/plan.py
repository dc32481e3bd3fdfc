"""Plans of mixed load: four request types, shared prefixes, one seed. Pure.

The types are the length quadrants: chat (short in, short out), summarise (long in, short out),
generate (short in, long out), rag (long in, long out).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from servoscope.lab.prompt import PromptMaker
from servoscope.lab.request import CHAT, COMPLETIONS, PlannedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FOUR_TYPES", "TypeShape", "mixed_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeShape:
    """One request type: where it goes and how long its prompts and answers are (inclusive)."""

    name: str
    endpoint: str
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


FOUR_TYPES = (
    TypeShape(name="chat", endpoint=CHAT, prompt_tokens=(48, 160), output_tokens=(8, 32)),
    TypeShape(
        name="summarise", endpoint=COMPLETIONS, prompt_tokens=(640, 1200), output_tokens=(8, 32)
    ),
    TypeShape(
        name="generate", endpoint=COMPLETIONS, prompt_tokens=(48, 160), output_tokens=(96, 160)
    ),
    TypeShape(name="rag", endpoint=CHAT, prompt_tokens=(640, 1200), output_tokens=(96, 160)),
)
PREFIXES_PER_TYPE = 3


def mixed_plan(
    count: int,
    *,
    seed: int = 0,
    types: Sequence[TypeShape] = FOUR_TYPES,
    model: str | None = None,
    vocabulary: range | None = None,
    characters_per_token: float = 1.0,
    shared_share: float = 0.5,
    abort_share: float = 0.0,
    streaming_share: float = 1.0,
    send_request_type: bool = True,
    rate_per_second: float | None = None,
    temperature: float = 0.0,
    request_id_prefix: str = "load",
) -> list[PlannedRequest]:
    """``count`` requests, the types in turn, so every run of ``len(types)`` has each once.

    ``vocabulary`` makes completions prompts token ids (exact lengths); chat prompts are always
    text. ``shared_share`` of the prompts begin with one of three prefixes of their type, six
    tenths of the type's shortest prompt long. ``abort_share`` of the requests are closed by the
    client, in turn early (0.01 to 0.1 s after the send) and after a few tokens.
    ``rate_per_second`` gives Poisson arrivals for run_open.
    """
    random = Random(seed)  # noqa: S311 - a plan that can be repeated, not a secret
    maker = PromptMaker(seed, characters_per_token)
    plan: list[PlannedRequest] = []
    arrival = 0.0
    aborts = 0
    for index in range(count):
        shape = types[index % len(types)]
        early = late = None
        if random.random() < abort_share:
            aborts += 1
            if aborts % 2:
                early = random.uniform(0.01, 0.1)
            else:
                late = random.randint(2, 6)
        plan.append(
            PlannedRequest(
                request_id=f"{request_id_prefix}-{seed}-{index}",
                prompt=_prompt(
                    maker, shape, index, random, lead_share=shared_share, vocabulary=vocabulary
                ),
                endpoint=shape.endpoint,
                max_tokens=random.randint(*shape.output_tokens),
                streaming=random.random() < streaming_share,
                request_type=shape.name,
                send_request_type=send_request_type,
                arrival_seconds=arrival,
                abort_after_seconds=early,
                abort_after_token_events=late,
                temperature=temperature,
                seed=seed + index,
                model=model,
            )
        )
        if rate_per_second is not None:
            arrival += random.expovariate(rate_per_second)
    return plan


def _prompt(
    maker: PromptMaker,
    shape: TypeShape,
    index: int,
    random: Random,
    *,
    lead_share: float,
    vocabulary: range | None,
) -> str | tuple[int, ...]:
    """A prompt of the type's length that begins with a shared piece or not."""
    tokens = random.randint(*shape.prompt_tokens)
    lead = 0
    if random.random() < lead_share:
        lead = shape.prompt_tokens[0] * 6 // 10
    pieces = [(f"own/{index}", tokens - lead)]
    if lead:
        pieces.insert(0, (f"{shape.name}/{random.randrange(PREFIXES_PER_TYPE)}", lead))
    if vocabulary is not None and shape.endpoint == COMPLETIONS:
        return tuple(i for key, size in pieces for i in maker.ids(key, size, vocabulary))
    return "".join(maker.text(key, size) for key, size in pieces)

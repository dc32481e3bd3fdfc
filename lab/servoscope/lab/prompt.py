"""Synthetic prompts of a wanted length: noise words or token ids, the same for the same key.

Equal keys give equal pieces, so a prompt that begins with a shared piece hits an engine's prefix
cache exactly as far as that piece reaches. Pure: the only randomness is the key's own.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

__all__ = ["PromptMaker"]

_ALPHABET = string.ascii_lowercase + " " * 5
MAX_PIECE_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes pieces of prompts. ``characters_per_token`` belongs to the engine's tokenizer.

    It is 1 for the embedded engine, and about 3 to 4 for a trained one: there a text's length in
    tokens is a target, and the engine's ``usage`` says what it became. Token ids are exact.
    """

    seed: int = 0
    characters_per_token: float = 1.0

    def text(self, key: str, tokens: int) -> str:
        """Noise words of about ``tokens`` tokens. Raises ValueError for a count out of bounds."""
        count = max(1, round(_bounded(tokens) * self.characters_per_token))
        return "".join(self._random(key).choices(_ALPHABET, k=count))

    def ids(self, key: str, tokens: int, vocabulary: range) -> tuple[int, ...]:
        """Exactly ``tokens`` ids out of ``vocabulary``. Raises ValueError as ``text`` does."""
        return tuple(self._random(key).choices(vocabulary, k=_bounded(tokens)))

    def _random(self, key: str) -> Random:
        return Random(f"{self.seed}/{key}")  # noqa: S311 - noise, not a secret


def _bounded(tokens: int) -> int:
    if not 1 <= tokens <= MAX_PIECE_TOKENS:
        raise ValueError(f"tokens: {tokens} is not in 1..{MAX_PIECE_TOKENS}")
    return tokens

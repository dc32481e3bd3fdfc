"""How a llama.cpp server was started, as far as its command line and environment tell. Pure.

No endpoint tells batch sizes, whether the slots share one KV cache, or after how long the server
unloads its model. Flags stand before the environment, as they do in the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

__all__ = ["VARIABLES", "Settings", "settings_of"]

#: Defaults of the builds of 2024 to b11549.
_BATCH_TOKENS, _UBATCH_TOKENS = 2_048, 512
_MAX_TOKENS = 10_000_000
_BATCH = ("LLAMA_ARG_BATCH", ("-b", "--batch-size"))
_UBATCH = ("LLAMA_ARG_UBATCH", ("-ub", "--ubatch-size"))
_PARALLEL = ("LLAMA_ARG_N_PARALLEL", ("-np", "--parallel"))
_SLEEP_FLAGS = ("--sleep-idle-seconds",)
_UNIFIED = ("-kvu", "--kv-unified")
_NOT_UNIFIED = ("-no-kvu", "--no-kv-unified")
_UNIFIED_VARIABLE = "LLAMA_ARG_KV_UNIFIED"
#: All that is looked at in the environment of the server's process.
VARIABLES = (_BATCH[0], _UBATCH[0], _PARALLEL[0], _UNIFIED_VARIABLE)
_ON = ("1", "true", "on", "enabled")


@dataclass(frozen=True, slots=True)
class Settings:
    """``None``: cannot be told.

    ``batch_tokens`` is the chunk in which prompts are computed (with those that decode in it),
    ``ubatch_tokens`` what the backend computes at once. ``unified``: all slots share one KV cache,
    so that ``n_ctx`` of a slot is all of it. ``sleeps``: the model may be unloaded when idle.
    """

    batch_tokens: int | None = None
    ubatch_tokens: int | None = None
    unified: bool | None = None
    sleeps: bool | None = None


def settings_of(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """From the process's own; both empty where the process is not ours to see.

    Only llama.cpp's own programs have llama.cpp's defaults: of another program (a wrapper, a
    library's server) no more is believed than it was told in llama.cpp's words.
    """
    own = bool(argv) and PurePath(argv[0]).name.startswith("llama")
    batch = _number(argv, environ, _BATCH)
    ubatch = _number(argv, environ, _UBATCH)
    if own:
        batch = _BATCH_TOKENS if batch is None else batch
        ubatch = _UBATCH_TOKENS if ubatch is None else ubatch
    if batch is not None and ubatch is not None:
        ubatch = min(ubatch, batch)  # as the context takes it
    return Settings(
        batch_tokens=batch,
        ubatch_tokens=ubatch,
        unified=_unified(argv, environ, own=own),
        sleeps=_sleeps(argv, own=own),
    )


def _unified(argv: Sequence[str], environ: Mapping[str, str], *, own: bool) -> bool | None:
    """Asked for; else shared only where the number of slots is the server's choice too."""
    if any(word in _NOT_UNIFIED for word in argv):
        return False
    if any(word in _UNIFIED for word in argv):
        return True
    told = environ.get(_UNIFIED_VARIABLE)
    if told is not None:
        return told.strip().lower() in _ON
    if _number(argv, environ, _PARALLEL) is not None:
        return False
    return True if own else None


def _sleeps(argv: Sequence[str], *, own: bool) -> bool | None:
    told = _value(argv, _SLEEP_FLAGS)
    if told is None:
        return False if own else None
    return not told.startswith("-")  # -1: never


def _number(
    argv: Sequence[str], environ: Mapping[str, str], named: tuple[str, tuple[str, ...]]
) -> int | None:
    """The setting as a positive number; other words (``auto``, ``-1``) are none."""
    variable, flags = named
    for text in (_value(argv, flags), environ.get(variable)):
        if text is not None:
            digits = text.strip()
            known = digits.isascii() and digits.isdigit() and len(digits) < 9
            return int(digits) if known and 0 < int(digits) <= _MAX_TOKENS else None
    return None


def _value(argv: Sequence[str], flags: Sequence[str]) -> str | None:
    """The last value given for one of ``flags``, as ``--flag VALUE`` or ``--flag=VALUE``."""
    found: str | None = None
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if word in flags and place + 1 < len(argv):
            found = argv[place + 1]
        elif equals and name in flags:
            found = value
    return found

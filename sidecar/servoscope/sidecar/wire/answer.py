"""What an answer has said so far: times of its tokens, counts, how it ended. Never its text."""

from __future__ import annotations

from typing import Any

__all__ = ["Answer", "clean", "count", "milliseconds"]

_MAX_SEQUENCES = 256  # choices told apart; more only means that TPOT is unknown anyway
_ID_LENGTH = 128
_MODEL_LENGTH = 256
_REASON_LENGTH = 32
# A finish reason of one choice does not hide the worse one of another.
_RANK = {"error": 3, "abort": 2, "cancelled": 2, "length": 1}


class Answer:
    """Facts of one answer, filled by a dialect.

    Times are seconds on the clock of the bytes' stamps. ``engine_*`` are what the engine measured
    itself (llama.cpp's ``timings``).
    """

    __slots__ = (
        "_finished",
        "_gap_limit",
        "_output_tokens",
        "_seen",
        "_timed",
        "cached_tokens",
        "engine_decode_seconds",
        "engine_prefill_seconds",
        "error",
        "finish_reason",
        "finished_at",
        "first_answer_at",
        "first_token_at",
        "gaps",
        "last_finished",
        "last_token_at",
        "max_gap",
        "model_name",
        "progress",
        "prompt_tokens",
        "response_id",
        "terminal_at",
        "token_events",
    )

    def __init__(self, gap_limit: int) -> None:
        self._gap_limit = gap_limit
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self._timed: dict[int, int] = {}  # choice → its tokens, by the engine's own timings
        self._output_tokens: int | None = None
        self.response_id: str | None = None
        self.model_name: str | None = None
        self.first_token_at: float | None = None
        self.first_answer_at: float | None = None
        self.last_token_at: float | None = None
        self.token_events = 0
        self.gaps: list[float] = []
        self.max_gap: float | None = None
        self.progress = False  # the engine said that it is working on the prompt
        self.error = False
        self.finish_reason: str | None = None
        self.last_finished = 0  # choice that ended last
        self.finished_at: float | None = None  # event with the (last) finish reason
        self.terminal_at: float | None = None  # nothing but the end of the body can follow
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.engine_prefill_seconds: float | None = None
        self.engine_decode_seconds: float | None = None

    @property
    def sequences(self) -> int:
        """Distinct choices seen; tokens of more than one cannot be told apart in ``usage``."""
        return len(self._seen)

    @property
    def timed(self) -> bool:
        """Whether the engine gave timings of a choice: then its ``usage`` is of one choice too."""
        return bool(self._timed)

    @property
    def output_tokens(self) -> int | None:
        """Generated tokens of all choices; ``None`` while the engine has told only those of some.

        From timings, where there are any (llama.cpp), else from ``usage``.
        """
        if not self._timed:
            return self._output_tokens
        return sum(self._timed.values()) if len(self._timed) >= self.sequences else None

    def identify(self, response_id: object, model: object) -> None:
        """Take id and model of the first event that has them."""
        if self.response_id is None:
            self.response_id = clean(response_id, _ID_LENGTH)
        if self.model_name is None:
            self.model_name = clean(model, _MODEL_LENGTH)

    def token(self, at: float, *, answer: bool) -> None:
        """An event with a generated token came; ``answer``: it is not reasoning."""
        self.token_events += 1
        if self.last_token_at is None:
            self.first_token_at = at
        else:
            gap = at - self.last_token_at
            if self.max_gap is None or gap > self.max_gap:
                self.max_gap = gap
            if len(self.gaps) < self._gap_limit:
                self.gaps.append(gap)
        self.last_token_at = at
        if answer and self.first_answer_at is None:
            self.first_answer_at = at

    def sequence(self, index: object) -> int:
        """Note that choice ``index`` exists (absent or odd: 0)."""
        number = index if type(index) is int else 0
        if len(self._seen) < _MAX_SEQUENCES:
            self._seen.add(number)
        return number

    def finish(self, reason: object, at: float | None, sequence: int = 0) -> None:
        """A choice ended. The answer has ended when all choices seen so far have."""
        text = clean(reason, _REASON_LENGTH) or "unknown"
        if self.finish_reason is None or _RANK.get(text, 0) > _RANK.get(self.finish_reason, 0):
            self.finish_reason = text
        if len(self._finished) < _MAX_SEQUENCES:
            self._finished.add(sequence)
        self.last_finished = sequence
        self.finished_at = at
        if at is not None and self.first_token_at is not None:
            self.last_token_at = at  # vLLM's last token travels with the reason
        if self._finished >= self._seen:
            self.terminal_at = at

    def usage(self, prompt: object, output: object, cached: object) -> None:
        """Token counts as the engine gives them; what is not a count changes nothing."""
        self.prompt_tokens = count(prompt, self.prompt_tokens)
        self._output_tokens = count(output, self._output_tokens)
        self.cached_tokens = count(cached, self.cached_tokens)

    def timed_output(self, tokens: int, sequence: int) -> None:
        """Tokens of one choice so far, by the engine's timings."""
        if sequence in self._timed or len(self._timed) < _MAX_SEQUENCES:
            self._timed[sequence] = tokens

    def shift(self, seconds: float) -> None:
        """The clock of the stamps was set by ``seconds``: move what was noted before."""
        for name in (
            "first_token_at",
            "first_answer_at",
            "last_token_at",
            "finished_at",
            "terminal_at",
        ):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value + seconds)


def clean(value: object, limit: int) -> str | None:
    """A bounded printable ASCII-or-Unicode text without control characters; None when empty."""
    if isinstance(value, bytes):
        value = value[: limit * 4].decode("utf-8", "replace")
    if not isinstance(value, str):
        return None
    text = value[:limit].strip()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text or None


def count(value: object, otherwise: int | None) -> int | None:
    """A token count, or ``otherwise`` for what is none."""
    return value if type(value) is int and value >= 0 else otherwise


def milliseconds(value: Any) -> float | None:
    """Milliseconds of JSON as seconds; None for what is not a finite number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value / 1000.0 if 0 <= value < 1e12 else None

"""Everything that is wrong with what people wrote, told in one go. Pure and bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

__all__ = ["MAX_PROBLEMS", "Problems", "SpecError", "shown"]

MAX_PROBLEMS = 20  # told of one file; the rest is counted

P = ParamSpec("P")
T = TypeVar("T")


class SpecError(ValueError):
    """What cannot be accepted: ``key`` is the YAML path, ``message`` says what would be.

    ``line`` counts from 1, ``None`` where it is not known. ``problems`` are all that were found,
    the first one being the error itself; ``omitted`` is how many more there were.
    """

    def __init__(self, key: str, message: str, *, line: int | None = None) -> None:
        super().__init__(key, message)
        self.key = key
        self.message = message
        self.line = line
        self.problems: tuple[SpecError, ...] = (self,)
        self.omitted = 0

    def lines(self, origin: str = "") -> list[str]:
        """One line a problem: ``chat.yaml: line 7: objectives[0].target: …``; origin the file."""
        before = f"{origin}: " if origin else ""
        told = [
            f"{before}{f'line {p.line}: ' if p.line is not None else ''}{p.key}: {p.message}"
            for p in self.problems
        ]
        return [*told, f"{before}and {self.omitted} more"] if self.omitted else told

    def __str__(self) -> str:
        return "\n".join(self.lines())


class Problems:
    """Gathers errors while parsing goes on."""

    def __init__(self) -> None:
        self.count = 0
        self._found: list[SpecError] = []

    def add(self, key: str, message: str) -> None:
        """Note one."""
        self.extend(SpecError(key, message))

    def extend(self, error: SpecError) -> None:
        """Note all of an error."""
        self.count += len(error.problems) + error.omitted
        self._found += error.problems[: MAX_PROBLEMS - len(self._found)]

    def take(self, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``parse`` returns, or ``None`` and its error noted."""
        try:
            return parse(*args, **kwargs)
        except SpecError as error:
            self.extend(error)
            return None

    def end(self, line_of: Callable[[str], int | None] = lambda _: None) -> None:
        """Raise what was noted, if anything, as one SpecError in the order of the lines.

        ``line_of`` gives a key's line where it is known.
        """
        if not self._found:
            return
        problems = [
            SpecError(p.key, p.message, line=p.line if p.line is not None else line_of(p.key))
            for p in self._found
        ]
        problems.sort(key=lambda p: p.line or 0)
        first = problems[0]
        first.problems = tuple(problems)
        first.omitted = self.count - len(problems)
        raise first


def shown(lines: Sequence[str]) -> list[str]:
    """The first lines and how many more there are."""
    more = len(lines) - MAX_PROBLEMS
    return [*lines[:MAX_PROBLEMS], f"and {more} more"] if more > 0 else list(lines)

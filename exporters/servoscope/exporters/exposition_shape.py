"""The shape of a text that was read: what the next one is laid over. Pure.

The next text of the same engine has the same lines with other numbers. So nothing is looked up and
no line is looked at by itself: comments are compared, what stands before the numbers is compared,
the numbers are cut off and read, each for all lines at once. What does not fit ends the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

__all__ = ["MAX_LINES_OF_SHAPE", "Series", "Shape"]

MAX_LINES_OF_SHAPE = 50_000  # texts with more lines are not kept


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Name and labels of one series. One parser makes one object a series: compare with ``is``."""

    name: str
    labels: tuple[tuple[str, str], ...]  # sorted by label name


class Shape:
    """A text without a fault in which no series stood twice."""

    def __init__(
        self,
        lines: Sequence[str],
        heads: Sequence[str],
        series: Sequence[Series | None],
        samples: dict[Series, float],
        tail: str,
    ) -> None:
        """What the text was.

        Args:
            lines: all of them, without their line feeds.
            heads: of each line what stands before its number; "" where more than that can change.
            series: of each line; None for comments and blank lines.
            samples: what the text said.
            tail: what followed the last line feed.
        """
        self._pieces = len(lines) + 1
        self._tail = tail
        self._samples = samples
        fixed = [i for i, one in enumerate(series) if one is None]
        quick = [i for i, one in enumerate(series) if one is not None and heads[i]]
        self._fixed = [lines[i] for i in fixed]
        self._pick_fixed, self._pick_quick = _picker(fixed), _picker(quick)
        self._heads = [heads[i] for i in quick]
        self._cuts = [slice(len(heads[i]), None) for i in quick]
        self._quick = [one for i in quick if (one := series[i]) is not None]
        self._slow = [(i, one) for i, one in enumerate(series) if one is not None and not heads[i]]

    def read(self, text: str, slowly: Callable[[str, Series], float]) -> dict[Series, float] | None:
        """The samples of ``text``, in the old order; ``None`` when it has another shape.

        Args:
            text: a whole text.
            slowly: reads one line that has to be a sample of the series; raises ValueError.
        """
        lines = text.split("\n", self._pieces)
        if len(lines) != self._pieces or lines[-1] != self._tail:
            return None
        moved = self._pick_quick(lines)
        if self._pick_fixed(lines) != self._fixed:
            return None
        if not all(map(str.startswith, moved, self._heads)):
            return None
        numbers = [line[cut] for line, cut in zip(moved, self._cuts, strict=True)]
        joined = "".join(numbers)
        if "_" in joined or not joined.isascii():  # float() takes more than the formats do
            return None
        samples = self._samples.copy()
        try:
            samples.update(zip(self._quick, map(float, numbers), strict=True))
            for at, series in self._slow:
                samples[series] = slowly(lines[at], series)
        except ValueError:
            return None
        return samples


def _picker(indexes: Sequence[int]) -> Callable[[list[str]], list[str]]:
    """Takes the lines at these places out of all."""
    if len(indexes) < 2:  # itemgetter() of one gives no sequence, of none does not exist
        return lambda lines: [lines[i] for i in indexes]
    pick = itemgetter(*indexes)
    return lambda lines: list(pick(lines))

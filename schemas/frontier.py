"""A low mark plus the runs decided above it: which numbers of 0, 1, 2, … are done.

Serves a consumer's commits, acknowledgements, and what each batch records as decided.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class Frontier:
    """A set of numbers that grows towards all numbers below a mark. Memory follows the gaps.

    >>> frontier = Frontier()
    >>> frontier.add(0), frontier.add(2), frontier.low_mark, frontier.runs
    (True, True, 1, ((2, 2),))
    """

    def __init__(self, low_mark: int = 0, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs` are inclusive and lie above the low mark; ValueError where they overlap it."""
        self._low_mark = low_mark
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            if first < low_mark or last < first:
                raise ValueError(f"run {first}..{last} is empty or below the low mark {low_mark}")
            at = bisect_right(self._firsts, last)
            if first < self._low_mark or (at > 0 and self._lasts[at - 1] >= first):
                raise ValueError(f"run {first}..{last} overlaps another")
            self._insert(first, last)

    @property
    def low_mark(self) -> int:
        """All numbers below it are in."""
        return self._low_mark

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The inclusive runs above the low mark, ascending, with a gap before each."""
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def __contains__(self, number: int) -> bool:
        if number < self._low_mark:
            return True
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """How many numbers are in, those below the low mark included."""
        return self._low_mark + sum(last - first + 1 for first, last in self.runs)

    def __repr__(self) -> str:
        return f"Frontier({self._low_mark}, {self.runs})"

    def add(self, number: int) -> bool:
        """Adds a number. False where it was in already."""
        if number in self:
            return False
        self._insert(number, number)
        return True

    def advance(self, low_mark: int) -> None:
        """Takes all numbers below `low_mark` in; a lower mark than now changes nothing."""
        if low_mark > self._low_mark:
            self._low_mark = low_mark
            self._absorb()

    def missing(self, end: int) -> Iterator[int]:
        """The numbers below `end` that are not in, ascending."""
        expected = self._low_mark
        for first, last in self.runs:
            yield from range(expected, min(first, end))
            expected = last + 1
        yield from range(expected, end)

    def _insert(self, first: int, last: int) -> None:
        at = bisect_right(self._firsts, first)
        joins_left = at > 0 and self._lasts[at - 1] + 1 == first
        joins_right = at < len(self._firsts) and last + 1 == self._firsts[at]
        if joins_left and joins_right:
            self._lasts[at - 1] = self._lasts.pop(at)
            self._firsts.pop(at)
        elif joins_left:
            self._lasts[at - 1] = last
        elif joins_right:
            self._firsts[at] = first
        else:
            self._firsts.insert(at, first)
            self._lasts.insert(at, last)
        self._absorb()

    def _absorb(self) -> None:
        while self._firsts and self._firsts[0] <= self._low_mark:
            self._low_mark = max(self._low_mark, self._lasts[0] + 1)
            del self._firsts[0], self._lasts[0]

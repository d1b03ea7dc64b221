"""A set of the numbers 0, 1, 2, …, as a low mark and the runs of numbers above it.

Workers use it for the offsets that are done, and batches for the tasks that are decided.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class Frontier:
    """A set of numbers from 0. It takes memory only for the gaps between them.

    >>> frontier = Frontier()
    >>> frontier.add(0), frontier.add(2), frontier.low_mark, frontier.runs
    (True, True, 1, ((2, 2),))
    """

    def __init__(self, low_mark: int = 0, runs: Iterable[tuple[int, int]] = ()) -> None:
        """All numbers below `low_mark` are in the set, and those of the inclusive `runs`.

        Raises ValueError if a run is empty, below the low mark, or overlaps another.
        """
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
        """All numbers below it are in the set."""
        return self._low_mark

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The inclusive runs above the low mark, ascending, with a gap before each of them."""
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def __contains__(self, number: int) -> bool:
        if number < self._low_mark:
            return True
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """Returns how many numbers are in the set, including those below the low mark."""
        return self._low_mark + sum(last - first + 1 for first, last in self.runs)

    def __repr__(self) -> str:
        return f"Frontier({self._low_mark}, {self.runs})"

    def add(self, number: int) -> bool:
        """Adds a number. Returns False if the set already had it."""
        if number in self:
            return False
        self._insert(number, number)
        return True

    def gaps(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields the inclusive runs of the numbers from `first` to `last` that it does not have."""
        first = max(first, self._low_mark)
        at = bisect_right(self._firsts, first)
        if at > 0:
            first = max(first, self._lasts[at - 1] + 1)
        while first <= last:
            end = last if at == len(self._firsts) else min(last, self._firsts[at] - 1)
            yield first, end
            if end == last:
                return
            first, at = self._lasts[at] + 1, at + 1

    def _insert(self, first: int, last: int) -> None:
        at = bisect_right(self._firsts, first)
        if at < len(self._firsts) and last + 1 == self._firsts[at]:
            del self._firsts[at]
            last = self._lasts.pop(at)
        if at > 0 and self._lasts[at - 1] + 1 == first:
            self._lasts[at - 1] = last
        elif first == self._low_mark:
            self._low_mark = last + 1
        else:
            self._firsts.insert(at, first)
            self._lasts.insert(at, last)

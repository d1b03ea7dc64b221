"""How many versions a token is behind, as batch assembly and the scheduler count it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable


class Staleness:
    """Counts versions, but not those that are known not to have changed the weights.

    The trainer skips a batch that it can't use, and publishes the same weights as the next version.
    Batch n may be assembled when version n - 1 - `prefetch` is published. So only skips up to that
    version count: then the result follows from the log alone, whoever read how much of it.
    """

    def __init__(self, prefetch: int, skipped: Iterable[int] = ()) -> None:
        self._prefetch = prefetch
        self._skipped = sorted(set(skipped))

    def skip(self, version: int) -> None:
        """Notes that a version has the weights of the one before it."""
        if version not in self._skipped:
            insort(self._skipped, version)

    @property
    def skips(self) -> int:
        """How many versions are known to be skipped."""
        return len(self._skipped)

    def skipped(self, version: int) -> bool:
        """Returns whether a version is known to have the weights of the one before it."""
        return version in self._skipped

    def behind(self, oldest: int, newest: int) -> int:
        """Returns how many versions `oldest` is behind the newest batch's version.

        A version below 0 is a demonstration's, which is never behind: the result is 0.
        """
        if oldest < 0:
            return 0
        known = max(oldest, newest - self._prefetch)
        skips = bisect_right(self._skipped, known) - bisect_right(self._skipped, oldest)
        return newest - oldest - skips

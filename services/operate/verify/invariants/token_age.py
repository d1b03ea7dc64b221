"""How many versions a token is behind, counted one by one: not as the product counts it."""

from __future__ import annotations

from collections.abc import Collection


def behind(oldest: int, newest: int, prefetch: int, skipped: Collection[int]) -> int:
    """The versions after `oldest`, up to the newest batch's, that changed the weights.

    A skip counts if it was certain to be known when the next batch was made. What was demonstrated
    is of no version, and never behind.
    """
    if oldest < 0:
        return 0
    versions = range(oldest + 1, newest + 1)
    return sum(one not in skipped or one > newest - prefetch for one in versions)

"""The turns of a trajectory are a tree: each names its parent. This finds its branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HasParent(Protocol):
    """A turn, as an event or as arrays."""

    @property
    def parent(self) -> int:
        """Index of the turn before it in its branch, or -1."""
        ...


def paths(turns: Sequence[HasParent]) -> list[list[int]]:
    """Returns the path from the root to each leaf, as turn indices, in the order of the leaves."""
    parents = {turn.parent for turn in turns}
    found = []
    for leaf in (index for index in range(len(turns)) if index not in parents):
        path, index = [], leaf
        while index >= 0:
            path.append(index)
            index = turns[index].parent
        found.append(path[::-1])
    return found

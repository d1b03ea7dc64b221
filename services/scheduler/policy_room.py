"""How many new groups may start for a policy in training.

The room for new groups is
(newest published - newest batch + max_staleness + 1) * groups per batch - open groups, and 0
before version 0. A group is open from its start until it is dropped, too stale for the next batch,
or in a batch's frontier. So filtered and stale groups free their room without a batch.

There is no room either while the trainer has its `prefetch` and two full batches of groups wait.
More groups would only wait and get stale: with a slow trainer, until all are `max_staleness` old.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.schemas.frontier import Frontier
from headrace.schemas.staleness import Staleness

ENOUGH_BATCHES = 2
"""So many full batches of waiting groups are enough for a trainer that is busy."""


@dataclass(slots=True)
class PolicyRoom:
    """The state of a policy in training."""

    groups: int
    max_staleness: int
    prefetch: int
    staleness: Staleness
    published: int | None = None
    batch: int = 0
    decided: Frontier = field(default_factory=Frontier)
    open: dict[int, int | None] = field(default_factory=dict)
    """Tasks that were started and are not decided. If the group is closed, with the version of the
    oldest token, or -1 if one is demonstrated."""

    @property
    def room(self) -> int:
        """How many groups may start now."""
        if self.published is None:
            return 0
        waiting = sum(oldest is not None for oldest in self.open.values())
        busy = self.batch - self.published >= self.prefetch
        if busy and waiting >= ENOUGH_BATCHES * self.groups:
            return 0
        ahead = self.published - self.batch + self.max_staleness + 1
        return ahead * self.groups - len(self.open)

    def free_stale(self) -> None:
        """Frees the room of closed groups that no batch can train any more."""
        for number, oldest in list(self.open.items()):
            if oldest is None:
                continue
            if self.staleness.behind(oldest, self.batch) > self.max_staleness:
                del self.open[number]

"""Makes recorded batches again, from the groups that they were made of. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.stream_jobs.batches import BatchAssembler


class Rebuilder:
    """Assembles recorded batches again from their groups.

    What the job had read when it assembled a batch follows from the batch: all groups up to the
    last one that it decided, and to its own `groups_read`. What else it had read was fresh and
    not chosen, and changes nothing.
    """

    def __init__(self, recipe: Recipe, policy: str, offsets: Mapping[int, int], end: int) -> None:
        """`offsets` says where each task's group lies, the first of each; `end` is behind all."""
        self._assembler = BatchAssembler(recipe, policy)
        self._policy = policy
        self._offsets = offsets
        self._end = end
        self._next = 0
        self._unknown: set[int] = set()

    def wants(self, batch: BatchAssembled) -> bool:
        """Whether another group was read before the batch was made."""
        decided = [self._offsets.get(task, -1) for task in decided_by(batch)]
        upto = max(batch.groups_read, *(offset + 1 for offset in decided), 0)
        return self._next < min(upto, self._end)

    def on_group(self, group: GroupClosed, offset: int, rebuilt: bool) -> None:
        """Takes the next group in; `rebuilt` where it was made again from its result."""
        self._assembler.on_group(group, offset)
        self._next = offset + 1
        if not rebuilt:
            self._unknown.add(group.task)

    def judge(self, batch: BatchAssembled) -> str:
        """Makes the batch again and compares; goes on from the recorded one."""
        self._assembler.on_policy(as_published(self._policy, batch.version - 1))
        made = self._assembler.next_batch(float("inf"))
        self._assembler.on_batch(batch)
        decided = decided_by(batch)
        if decided & self._unknown or not decided <= self._offsets.keys():
            return "unknown"
        return "same" if made == batch else "differs"


def decided_by(batch: BatchAssembled) -> set[int]:
    """The tasks that a batch decides: each has a sample in it, or is dropped."""
    return {one.task for one in batch.samples} | {one.task for one in batch.dropped}


def as_published(policy: str, version: int) -> PolicyPublished:
    """What tells a batch assembler that a version is there: in a replay nothing waits for it."""
    return PolicyPublished(
        policy=policy, version=version, status="trained", digest=bytes(32), full_version=version
    )

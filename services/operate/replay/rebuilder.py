"""Assembles recorded batches again from their groups. Does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.stream_jobs.barrier import PASSED_OVER
from headrace.stream_jobs.batches import BatchAssembler


class Rebuilder:
    """Assembles recorded batches again from their groups.

    A batch itself shows what the job had read when it assembled it: all groups up to the last one
    that the batch decided, and up to its own `groups_read`. If the job had read more groups, they
    were fresh and not chosen, so they change nothing.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: str,
        offsets: Mapping[int, int],
        end: int,
        skipped: Collection[int] = (),
    ) -> None:
        """`offsets` maps each task to the offset of its first group; `end` is after the last.

        `skipped` are the versions that the recorded run skipped.
        """
        self._assembler = BatchAssembler(recipe, policy, skipped=skipped)
        self._policy = policy
        self._offsets = offsets
        self._end = end
        self._next = 0
        self._unknown: set[int] = set()

    def wants(self, batch: BatchAssembled) -> bool:
        """Whether the job read another group before it assembled the batch."""
        decided = [self._offsets.get(task, -1) for task in decided_by(batch)]
        upto = max(batch.groups_read, *(offset + 1 for offset in decided), 0)
        return self._next < min(upto, self._end)

    def on_group(self, group: GroupClosed, offset: int, rebuilt: bool) -> None:
        """Adds the next group.

        `rebuilt` is False if its result is gone, so that the group could not be made again.
        """
        self._assembler.on_group(group, offset)
        self._next = offset + 1
        if not rebuilt:
            self._unknown.add(group.task)

    def judge(self, batch: BatchAssembled) -> str:
        """Assembles the batch again and compares: `same`, `differs` or `unknown`.

        The next batch is assembled after the recorded one, whatever the result.
        """
        self._assembler.on_policy(as_published(self._policy, batch.version - 1))
        # Groups may have piled up although no barrier held the batch. Only its drops tell.
        passed_over = any(one.reason == PASSED_OVER for one in batch.dropped)
        decided = decided_by(batch)
        # More groups may be known, because an earlier batch decided a later one.
        below = 1 + max((self._offsets.get(task, -1) for task in decided), default=-1)
        made = self._assembler.next_batch(float("inf"), passes_over=passed_over, drawn_below=below)
        self._assembler.on_batch(batch)
        if decided & self._unknown or not decided <= self._offsets.keys():
            return "unknown"
        return "same" if made == batch else "differs"


def decided_by(batch: BatchAssembled) -> set[int]:
    """Returns the tasks that a batch decides: it trains on a fresh sample of each, or drops it."""
    return {one.task for one in batch.samples if one.use == 0} | {one.task for one in batch.dropped}


def as_published(policy: str, version: int) -> PolicyPublished:
    """Makes the publication of a version, as a batch assembler expects it.

    In a replay no batch waits for its predecessor's version.
    """
    return PolicyPublished(
        policy=policy, version=version, status="trained", digest=bytes(32), full_version=version
    )

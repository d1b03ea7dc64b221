"""The same log gives the same again: each group from its result, each batch from its groups."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished, TaskEnded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.replay.rebuilder import Rebuilder
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.stream_jobs.groups import GroupAssembler


def unrepeatable(facts: Facts, recipe: Recipe) -> Iterator[str]:
    """Groups and batches that come out otherwise, as `headrace replay batches` makes them."""
    assembler = GroupAssembler(recipe)
    made = {
        (group.policy, group.task): group
        for one in facts.all(TaskEnded)
        for group in assembler.on_task(one.event, round(one.recorded_at * 1000))
    }
    for policy, settings in recipe.policies.items():
        if settings.training is not None:
            yield from _batches(facts, recipe, policy, made)


def _batches(
    facts: Facts, recipe: Recipe, policy: str, made: dict[tuple[str, int], GroupClosed]
) -> Iterator[str]:
    records = [one for one in facts.in_order(GroupClosed) if one.event.policy == policy]
    offsets: dict[int, int] = {}
    for one in records:
        offsets.setdefault(one.event.task, one.offset)
    published = [one for one in facts.events(PolicyPublished) if one.policy == policy]
    skipped = {one.version for one in published if one.status == "skipped"}
    end = records[-1].offset + 1 if records else 0
    rebuilder = Rebuilder(recipe, policy, offsets, end, skipped)
    groups = iter(records)
    for batch in (one for one in facts.events(BatchAssembled) if one.policy == policy):
        while rebuilder.wants(batch):
            one = next(groups)
            known = made.get((policy, one.event.task))
            if one.offset == offsets[one.event.task] and known != one.event:
                yield f"I9: group {policy}/{one.event.task} comes out otherwise from its result"
            rebuilder.on_group(one.event, one.offset, True)
        if (verdict := rebuilder.judge(batch)) != "same":
            yield f"I9: batch {policy}/{batch.version} {verdict} if it is assembled again"

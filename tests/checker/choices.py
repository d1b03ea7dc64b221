"""I9: the log gives every choice of the task source again."""

from __future__ import annotations

import json

from headrace.schemas.events import GroupClosed, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.tasks.curation.choose_items import STATE, Chosen, Curation, Cursor
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from tests.checker.facts import Facts, Violations


def check(facts: Facts, recipe: Recipe) -> Violations:
    """Chooses every task of a curated recipe again, from its labels and the groups."""
    policy = recipe.curating_policy
    if policy is None:
        return
    tasks = [one for one in facts.tasks.values() if STATE in one.event.labels]
    groups = [one for one in facts.in_order(GroupClosed) if one.event.policy == policy]
    earlier: set[str] = set()
    curation = Curation(recipe, ItemStatistics(policy), earlier)
    position = 0
    for one in sorted(tasks, key=lambda one: (_group(one), one.offset)):
        while position < len(groups) and groups[position].offset <= _group(one):
            curation.on_group(groups[position].event, groups[position].offset)
            position += 1
        earlier.clear()
        earlier.update(task.event.task_id for task in tasks if task.offset < one.offset)
        # A source that was killed may have sent a task that its successor did not know.
        found = [_again(curation, one)]
        earlier.clear()
        found.append(_again(curation, one))
        if one.event.task_id not in found:
            yield f"I9: task {one.event.task_id} was chosen, and the log gives {' or '.join(found)}"


def _group(task: Delivery[TaskSubmitted]) -> int:
    return int(task.event.labels["curation.group"])


def _again(curation: Curation, task: Delivery[TaskSubmitted]) -> str:
    curation.cursor = Cursor(*json.loads(task.event.labels[STATE])["from"])
    (*_, found) = curation.search()
    if not isinstance(found, Chosen):
        return "none"
    if found.labels != task.event.labels and found.task_id == task.event.task_id:
        return f"other labels: {found.labels}"
    return found.task_id

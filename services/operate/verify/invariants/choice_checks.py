"""I9: the log gives every choice of the task source again."""

from __future__ import annotations

import json

from headrace.schemas.events import GroupClosed, PolicyPublished, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.tasks.curation.choose_items import STATE, Chosen, Curation, Cursor
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from headrace.services.tasks.league import LABEL, Opponents, has_opponents
from headrace.services.tasks.source import SOURCE
from headrace.services.tasks.warm_start import WARM_START


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


def check_opponents(facts: Facts, recipe: Recipe) -> Violations:
    """Draws the opponents of every task again, from its label and the published versions."""
    league = recipe.tasks.league
    if league is None:
        return
    opponents = {policy: Opponents(league, recipe.tasks.seed) for policy in recipe.policies}
    for published in facts.events(PolicyPublished):
        opponents[published.policy].on_published(published.version)
    for task in (one.event for one in facts.tasks.values()):
        if task.source != SOURCE or task.task_id.startswith(WARM_START):
            continue
        plays = has_opponents(league, task)
        for role, use in task.roles.items():
            expected = None
            if plays and role in league.roles:
                newest = int(task.labels.get(LABEL + use.policy, -1))
                known = newest in opponents[use.policy].versions
                expected = opponents[use.policy].drawn(newest) if known else -1
            if use.version != expected:
                yield (
                    f"I9: version {use.version} plays {role} in task {task.task_id}, and the log "
                    f"gives {expected}"
                )


def _group(task: Delivery[TaskSubmitted]) -> int:
    return int(task.event.labels["curation.group"])


def _again(curation: Curation, task: Delivery[TaskSubmitted]) -> str:
    curation.cursor = Cursor(*json.loads(task.event.labels[STATE])["from"])
    (*_, found) = curation.search()
    if not isinstance(found, Chosen):
        return "none"
    labels = {
        name: label for name, label in task.event.labels.items() if not name.startswith(LABEL)
    }
    if found.labels != labels and found.task_id == task.event.task_id:
        return f"other labels: {found.labels}"
    return found.task_id

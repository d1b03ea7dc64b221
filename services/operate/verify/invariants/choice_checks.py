"""I9: the log gives every choice of the task source again."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Sequence

from headrace.schemas.events import GroupClosed, PolicyPublished, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.tasks.curation.choose_items import STATE, Chosen, Curation, Cursor, Unchosen
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
    tasks.sort(key=lambda one: (_group(one), one.offset))
    groups = [one for one in facts.in_order(GroupClosed) if one.event.policy == policy]
    by_cursor: dict[Cursor, Delivery[TaskSubmitted]] = {}
    chooser = _Chooser(recipe, policy, groups)
    for one in tasks:
        begun = _cursor(one, "from")
        chooser.continue_after(by_cursor.get(begun), begun, _group(one))
        earlier = {task.event.task_id for task in tasks if task.offset < one.offset}
        # A source that was killed may have sent a task that its successor did not know.
        found = [chooser.choose(earlier), chooser.choose(())]
        right = [choice for choice in found if _gives(choice, one)]
        if right:
            chooser.accept(right[0])
        else:
            told = " or ".join(_described(choice, one) for choice in found)
            yield f"I9: task {one.event.task_id} was chosen, and the log gives {told}"
        by_cursor[_cursor(one, "cursor")] = one


class _Chooser:
    """Chooses tasks as their source did, from the task before each of them and the groups."""

    def __init__(
        self, recipe: Recipe, policy: str, groups: Sequence[Delivery[GroupClosed]]
    ) -> None:
        self._groups = groups
        self._offsets = [one.offset for one in groups]
        self._added = 0
        self._earlier: set[str] = set()
        self._curation = Curation(recipe, ItemStatistics(policy), self._earlier)

    def continue_after(
        self, before: Delivery[TaskSubmitted] | None, begun: Cursor, newest: int
    ) -> None:
        """Goes on after the task `before`, whose cursor is `begun`, with the groups up to the
        offset `newest`."""
        if before is not None and self._curation.cursor != begun:
            # Between them the source was killed, and its successor does not know the last task.
            self._curation.restore(before.event)
            first = bisect_left(self._offsets, self._curation.groups_read)
            for one in self._groups[first : self._added]:
                self._curation.on_group(one.event, one.offset)
        self._curation.cursor = begun
        while self._added < len(self._groups) and self._groups[self._added].offset <= newest:
            one = self._groups[self._added]
            self._curation.on_group(one.event, one.offset)
            self._added += 1

    def choose(self, earlier: Collection[str]) -> Chosen | Unchosen | None:
        """Returns what a search finds while the `earlier` tasks are known."""
        self._earlier.clear()
        self._earlier.update(earlier)
        (*_, found) = self._curation.search()
        return found

    def accept(self, chosen: Chosen | Unchosen | None) -> None:
        """The next task comes after this one."""
        if isinstance(chosen, Chosen):
            self._curation.accept(chosen)


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


def _cursor(task: Delivery[TaskSubmitted], name: str) -> Cursor:
    return Cursor(*json.loads(task.event.labels[STATE])[name])


def _gives(choice: Chosen | Unchosen | None, task: Delivery[TaskSubmitted]) -> bool:
    return (
        isinstance(choice, Chosen)
        and choice.task_id == task.event.task_id
        and choice.labels == _labels(task)
    )


def _described(choice: Chosen | Unchosen | None, task: Delivery[TaskSubmitted]) -> str:
    if not isinstance(choice, Chosen):
        return "none"
    if choice.task_id != task.event.task_id:
        return choice.task_id
    return f"other labels: {choice.labels}"


def _labels(task: Delivery[TaskSubmitted]) -> dict[str, str]:
    return {name: one for name, one in task.event.labels.items() if not name.startswith(LABEL)}

"""Lets past versions of a policy play roles of new tasks, as the opponents in self-play.

The first version at or after each multiple of `every` becomes an opponent. Each time that there is
a new one, the opponent of the next tasks is drawn from the newest `past` of them. So few past
versions are in use at the same time, however many episodes run: an engine holds one at a time.

The draws depend only on the seeds of the tasks and on the newest opponent, which a label names. So
the log gives them again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from headrace.schemas.events import PolicyPublished, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.task_settings import League
from headrace.schemas.topics import POLICIES
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events

LABEL = "league."
"""Followed by a policy, it labels a task with the policy's newest opponent when it was made."""


class Opponents:
    """The versions of one policy that are opponents."""

    def __init__(self, league: League, seed: int) -> None:
        """`seed` is that of the recipe's tasks."""
        self._league = league
        self._seed = seed
        self.versions: list[int] = []
        """In ascending order."""

    def on_published(self, version: int) -> None:
        """Adds the version if it is the first one at or after a multiple of `every`."""
        every = self._league.every
        newest = self.versions[-1] if self.versions else -every
        if version // every > newest // every:
            self.versions.append(version)

    def drawn(self, newest: int) -> int:
        """Returns the version that plays while `newest`, which is one of them, is the newest."""
        end = self.versions.index(newest) + 1
        past = self.versions[max(0, end - self._league.past) : end]
        return random.Random(f"{self._seed}/{newest}").choice(past)


def has_opponents(league: League, task: TaskSubmitted) -> bool:
    """Whether past versions play in a task of the league."""
    return random.Random(f"{task.seed}/{task.task_id}").random() < league.share


class LeagueTasks:
    """Gives tasks their opponents, by the versions that it follows."""

    def __init__(self, recipe: Recipe, league: League) -> None:
        roles = recipe.tasks.roles
        self._league = league
        self._opponents = {
            roles[role]: Opponents(league, recipe.tasks.seed) for role in league.roles
        }
        self._known = asyncio.Event()

    async def follow(self, log: EventLog) -> None:
        """Follows the versions without end."""
        caught_up = False
        async with aclosing(follow_events(log, {log.topics.partition(POLICIES): "first"})) as items:
            async for item in items:
                caught_up = caught_up or isinstance(item, CaughtUp)
                if not isinstance(item, CaughtUp) and isinstance(item.event, PolicyPublished):
                    self._on_published(item.event)
                # A task of a restarted source gets no older opponent than the log has.
                if caught_up and all(one.versions for one in self._opponents.values()):
                    self._known.set()

    async def with_opponents(self, task: TaskSubmitted) -> TaskSubmitted:
        """Returns the task with its opponents, or as it is if the newest versions play all roles.

        Waits until each policy of the league has published version 0.
        """
        if not has_opponents(self._league, task):
            return task
        await self._known.wait()
        newest = {policy: one.versions[-1] for policy, one in self._opponents.items()}
        drawn = {policy: self._opponents[policy].drawn(newest[policy]) for policy in newest}
        roles = {
            role: use.model_copy(update={"version": drawn[use.policy]})
            if role in self._league.roles
            else use
            for role, use in task.roles.items()
        }
        labels = {LABEL + policy: str(version) for policy, version in newest.items()}
        return task.model_copy(update={"roles": roles, "labels": {**task.labels, **labels}})

    def _on_published(self, event: PolicyPublished) -> None:
        if event.policy in self._opponents:
            self._opponents[event.policy].on_published(event.version)

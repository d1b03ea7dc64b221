"""One agent under trial, and what the rules share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.schemas.events import EpisodeStarted, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.requests import Answer
from headrace.services.operate.conformance.agent.outside_calls import outside_calls
from headrace.services.operate.conformance.agent.scripted_episode import Script, ScriptedEpisode
from headrace.services.operate.conformance.conformance_report import NotChecked, Violation
from headrace.services.operate.try_episode.players import scripted_player

SEED = 7


@dataclass(eq=False)
class AgentTrial:
    """Plays episodes of the same task with the same script."""

    recipe: Recipe
    make: Callable[[], AgentSetup]
    """Makes the agent from its options. A worker does that once."""
    submitted: TaskSubmitted
    script: Script
    blocked_s: float
    """Most seconds for which the asyncio loop may be blocked."""
    connects: bool = False
    """Whether the agent may connect to something."""
    made: AgentSetup | None = None
    connections: dict[str, None] = field(default_factory=dict)
    """What the agent did with sockets in all episodes, in order."""
    _unmade: str = ""

    @property
    def setup(self) -> AgentSetup:
        """The agent. Raises Violation if it can't be made, and NotChecked after that."""
        if self._unmade:
            raise NotChecked(f"the agent can't be made: {self._unmade}")
        if self.made is None:
            try:
                self.made = self.make()
            except Exception as error:  # a user's own code may raise anything
                self._unmade = f"{type(error).__name__}: {error}"
                raise Violation(f"the agent can't be made: {self._unmade}") from error
        return self.made

    def episode(
        self,
        script: Script | None = None,
        before: ScriptedEpisode | None = None,
        calls: Collection[str] = (),
        **limits: int,
    ) -> ScriptedEpisode:
        """Returns an episode that was not played yet. `limits` are fields of its task.

        It has the recorded answers of the episode `before` to these calls.
        """
        script = self.script if script is None else script
        submitted = self.submitted.model_copy(update=limits)
        deadline = int((time.time() + submitted.deadline_s) * 1000)
        started = EpisodeStarted(
            task=0, sample=0, submitted=submitted, seed=SEED, deadline=deadline
        )
        said = itertools.cycle(script.answers)
        player = scripted_player(self.recipe, lambda _: next(said))
        recorded: dict[str, Answer] = {}
        if before is not None:
            recorded = {call: before.answers[call] for call in calls}
            for _ in before.scripted.intersection(calls):
                next(said)
        return ScriptedEpisode(script, started, self.setup, player, recorded)

    async def played(self, episode: ScriptedEpisode | None = None) -> ScriptedEpisode:
        """Plays an episode and returns it. Raises Violation if it does not finish by itself."""
        episode = self.episode() if episode is None else episode
        await self.ended(episode)
        assert episode.outcome is not None, "an episode always has an outcome"
        if episode.outcome.ending != "finished":
            failure = episode.outcome.failure
            why = f": {failure.message}" if failure is not None else ""
            raise Violation(f"the episode ended as {episode.outcome.ending!r}{why}")
        return episode

    async def ended(
        self,
        episode: ScriptedEpisode,
        beside: Callable[[EpisodeRun], Coroutine[Any, Any, None]] | None = None,
    ) -> str:
        """Plays an episode to whatever end. Returns its ending."""
        with outside_calls() as found:
            await episode.play(_nothing if beside is None else beside)
        self.connections.update({one: None for one in found if one.startswith("socket.")})
        assert episode.outcome is not None, "an episode always has an outcome"
        return episode.outcome.ending

    def changed(self, **fields: Any) -> Script:
        """Returns the script with other fields."""
        return replace(self.script, **fields)

    def require_replayable(self) -> None:
        """Raises NotChecked if the agent never runs against recorded answers."""
        if not self.setup.replayable:
            raise NotChecked("the agent says `replayable = False`")


async def _nothing(run: EpisodeRun) -> None:
    """Leaves the episode alone."""


def require_same_requests(one: Mapping[str, str], other: Mapping[str, str], what: str) -> None:
    """Raises Violation if two episodes asked for different things. `what` says which they are."""
    for call in [*one, *(call for call in other if call not in one)]:
        first, second = one.get(call, "nothing"), other.get(call, "nothing")
        if first != second:
            raise Violation(f"{what} differ at request {call}: {first:.150} and {second:.150}")

"""Exports the conversations of good training episodes as a file for supervised fine-tuning."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headrace.schemas.events import TrajectoryRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.role_rewards import passes
from headrace.services.log.unpacked import Texts
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.trajectories.recorded_episodes import (
    UNREAD,
    EpisodeReader,
    Prompts,
    RecordedEpisode,
)
from headrace.services.operate.trajectories.sft import (
    SftFile,
    conversation_of,
    learned_paths,
    tool_format,
)


class Selection:
    """Chooses the episodes that a model should learn from, and counts what it leaves out."""

    def __init__(self, recipe: Recipe, passing: float | None, agent: str | None = None) -> None:
        """`passing` is the least reward. None stands for the recipe's, or 1.

        If an `agent` is given, episodes of others are left out.
        """
        self._agent = agent
        evaluation = recipe.evaluation.passing if recipe.evaluation is not None else 1.0
        self.passing = evaluation if passing is None else passing
        self.counts: Counter[str] = Counter()
        """How many episodes were exported, and how many were left out, by the reason."""
        self._forms = {name: tool_format(one.options) for name, one in recipe.agents.items()}

    def lines(self, episode: RecordedEpisode, prompts: Prompts) -> list[dict[str, Any]]:
        """Returns the conversations of an episode; none if it is left out."""
        recorded, found, taught = episode.recorded, list[dict[str, Any]](), set[int]()
        form = self._forms.get(recorded.agent, "hermes")
        reason = self.reason(recorded)
        if not reason:
            paths = learned_paths(episode)
            reason = "exported" if paths else "without a trainable turn"
            try:
                for path in paths:
                    found.append(conversation_of(episode, prompts, path, form, taught))
                    taught |= set(path)
            except ValueError:
                found = []
                reason = "whose prompts the log no longer has"
        self.counts[reason] += 1
        return found

    def reason(self, recorded: TrajectoryRecorded) -> str:
        """Returns why an episode is left out, whatever its turns are; empty if it is not."""
        if recorded.purpose == "evaluate":
            return "of evaluations"
        if self._agent not in (None, recorded.agent):
            return f"of other agents than {self._agent}"
        if recorded.reward is None or not passes(recorded.reward, self.passing):
            return f"without a reward of at least {self.passing:g}"
        return ""

    def report(self) -> str:
        """Returns how many episodes were left out, and why; empty if none was."""
        left = [(count, why) for why, count in self.counts.items() if why != "exported"]
        return ", ".join(f"{count} {why}" for count, why in sorted(left, reverse=True))


async def export_sft(
    cluster: ClusterConfig,
    file: Path,
    tasks: Collection[int],
    most: int,
    passing: float | None,
    say: Callable[[str], None],
) -> Selection:
    """Writes the file. `tasks` and `most` as for `EpisodeReader.read`.

    Raises DependencyError if the disk can't take the file.
    """
    async with (
        running_stack(cluster, say) as (_, located),
        open_namespace(located, "trajectories") as (log, life),
    ):
        recipe = life.recipe()
        selection = Selection(recipe, passing)
        reader = EpisodeReader(log, Texts(recipe), with_answers=False, with_prompts=True)
        with SftFile(file) as output:
            async with aclosing(reader.read(tasks, most)) as episodes:
                async for episode in episodes:
                    lines = selection.lines(episode, reader.prompts)
                    await asyncio.to_thread(output.write, lines)
        if reader.unread:
            selection.counts[UNREAD] = reader.unread
    return selection

"""`headrace.play_episode`: plays one episode from Python, for tests and notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.schemas.events import EpisodeEnded
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.try_episode.local_episode import play
from headrace.services.operate.try_episode.players import scripted_player
from headrace.services.operate.try_episode.transcript import Transcript


def play_episode(
    recipe: str | Path,
    answer: Callable[[str], str],
    *,
    item: int = 0,
    settings: Sequence[str] = (),
) -> EpisodeEnded:
    """Plays one episode of a recipe, without Kafka and without a model. Returns its outcome.

    The recipe's own agent plays in its own environment, with its limits, and each turn is printed,
    as `headrace try` does. `recipe` is a .toml file or the name of a shipped recipe. `answer` gets
    the new text of each prompt (for a chat, its messages as JSON) and returns what the policy
    answers. `item` is the item of the data set, counted from 0. `settings` override keys of the
    recipe: `("tasks.max_turns=4",)`.

    Of the outcome, `reward`, `rewards`, `ending` and `failure` matter most. Raises UsageError if
    the recipe or the item can't be used, or if the policy could not give an answer, for example
    because `sampling.allowed` lacks its tokens. What `answer` raises is raised here, too.
    """

    async def run() -> EpisodeEnded:
        resolved = read_recipe(str(recipe), settings)
        return await play(resolved, item, scripted_player(resolved, answer), Transcript())

    # In a thread of its own it works in notebooks, too: their thread runs a loop already.
    return in_daemon_thread(lambda: asyncio.run(run()), "play-episode").result()

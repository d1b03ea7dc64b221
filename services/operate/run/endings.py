"""How episodes end: the kinds of failures with their counts, and hints for people.

A pure fold over the outcomes of tasks. Messages that differ only in their numbers are one kind.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from headrace.schemas.events import EpisodeEnded, TaskEnded
from headrace.schemas.recipe.recipe import Recipe

MOST_KINDS = 200
"""Kinds of failures that are kept apart. Further ones count as one kind."""
MESSAGE = 160
"""Most characters of a message that is shown."""
HOPELESS = 32
"""If so many episodes of a command have ended, and all failed in the same way, it stops."""
WINDOW = 512
"""The newest episodes, from which the hints come."""
HINTED = 64
"""Fewer episodes give no hint."""
CONSTANT = 256
"""Fewer episodes give no hint about rewards: at first most policies have none."""
SHARE = 0.25
"""A limit that ends a larger share of the episodes is worth a hint."""
CUT = frozenset({"turn_limit", "token_limit", "overflow"})
_NUMBER = re.compile(r"\d+")


def without_numbers(message: str) -> str:
    """Returns what messages have in common that differ only in their numbers."""
    return _NUMBER.sub("#", message)


class _Key(NamedTuple):
    code: str
    message: str


@dataclass
class Kind:
    """One kind of failure."""

    code: str
    message: str
    """The message of the first one."""
    task: int
    sample: int
    count: int = 0
    shown: int = 0
    """The count at which it was last shown."""

    def __str__(self) -> str:
        text = " ".join(self.message.split())
        short = text if len(text) <= MESSAGE else f"{text[: MESSAGE - 1]}…"
        return f"{self.count:,} times {self.code}: {short}; headrace show {self.task}/{self.sample}"


class _Seen(NamedTuple):
    ending: str
    rewards: tuple[float, ...]


class Endings:
    """Folds the results of tasks."""

    def __init__(self, recipe: Recipe, since: float) -> None:
        """`since` is when the command began, in epoch seconds."""
        self._recipe = recipe
        trained = [one.training for one in recipe.policies.values() if one.training is not None]
        self._untaught = [one for one in trained if one.teacher is None]
        """Those that learn from rewards alone."""
        self._since = since
        self._kinds: dict[_Key, Kind] = {}
        self._of_command: Counter[_Key | None] = Counter()
        """How the episodes that ended since then ended: their failure, or None."""
        self._recent: deque[_Seen] = deque(maxlen=WINDOW)
        self._varied: deque[bool] = deque(maxlen=WINDOW)
        """Whether the rewards of a task differ, for the newest tasks with several rewards."""

    def on_task_ended(self, event: TaskEnded, at: float) -> None:
        """Adds a result that was recorded at `at`, in epoch seconds."""
        for outcome in event.outcomes:
            self._on_outcome(outcome, at)
        rewards = [one for outcome in event.outcomes if (one := _rewards(outcome))]
        if len(rewards) > 1:
            self._varied.append(len(set(rewards)) > 1)

    def _on_outcome(self, outcome: EpisodeEnded, at: float) -> None:
        failure, key = outcome.failure, None
        if outcome.ending == "failed" and failure is not None:
            key = _Key(failure.code, without_numbers(failure.message))
            if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
                key = _Key("others", "failures of further kinds")
            kind = self._kinds.setdefault(
                key, Kind(failure.code, failure.message, outcome.task, outcome.sample)
            )
            kind.count += 1
        if at >= self._since and outcome.ending != "cancelled":
            self._of_command[key] += 1
        self._recent.append(_Seen(outcome.ending, _rewards(outcome)))

    def top(self, count: int = 3) -> list[Kind]:
        """Returns the most frequent kinds of failures."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)[:count]

    def news(self) -> list[str]:
        """Returns a line for each kind whose count has reached a new power of ten."""
        due = [kind for kind in self._kinds.values() if kind.count >= 10 * kind.shown]
        for kind in due:
            kind.shown = 10 ** (len(str(kind.count)) - 1)
        return [f"failed: {kind}" for kind in due]

    def hopeless(self) -> str | None:
        """Returns why the run is of no use: all episodes of the command failed in one way."""
        total = self._of_command.total()
        if total < HOPELESS or len(self._of_command) > 1:
            return None
        (key,) = self._of_command
        if key is None:
            return None
        return f"all of the first {total} episodes failed in the same way: {self._kinds[key]}"

    @property
    def reach_limits(self) -> bool:
        """Whether a hint says that limits of turns or tokens cut many episodes."""
        cut = sum(one.ending in CUT for one in self._recent)
        return len(self._recent) >= HINTED and cut > SHARE * len(self._recent)

    def hints(self) -> list[str]:
        """Returns what people should look at, from the newest episodes."""
        tasks, seen = self._recipe.tasks, len(self._recent)
        if seen < HINTED:
            return []
        hints = []
        endings = Counter(one.ending for one in self._recent)
        if (share := endings["deadline"] / seen) > SHARE:
            hints.append(
                f"{share:.0%} of the episodes reach their deadline: raise tasks.deadline_s "
                f"({tasks.deadline_s} s), or find out what they wait for"
            )
        if (share := endings["turn_limit"] / seen) > SHARE:
            hints.append(
                f"{share:.0%} of the episodes reach tasks.max_turns ({tasks.max_turns}), which "
                "counts the generations of all roles together"
            )
        if (share := (endings["token_limit"] + endings["overflow"]) / seen) > SHARE:
            hints.append(
                f"{share:.0%} of the episodes run out of tokens: raise tasks.max_tokens "
                f"({tasks.max_tokens}), or use a model with a longer context"
            )
        if seen >= CONSTANT and not any(self._varied):
            hints += self._without_difference()
        return hints

    def _without_difference(self) -> list[str]:
        rewards = {one.rewards for one in self._recent if one.rewards}
        if not rewards:
            return ["no episode has a reward: nothing can be learned from them"]
        if not self._untaught:
            return []
        if len(rewards) == 1:
            return [f"every reward is {rewards.pop()[0]:g}: nothing can be learned from them"]
        if not self._varied or all(one.critic is not None for one in self._untaught):
            return []
        return [
            "within each task all rewards are equal, so the advantages are 0 and nothing is "
            "learned: use easier tasks, more tasks.samples, or a reward with more values"
        ]


def _rewards(outcome: EpisodeEnded) -> tuple[float, ...]:
    """Returns the reward of an episode and those of its roles. Empty if it has none."""
    if outcome.reward is None:
        return ()
    return (
        outcome.reward,
        *(outcome.rewards.get(one.role, outcome.reward) for one in outcome.policies),
    )

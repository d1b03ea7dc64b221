"""Answers and ends that are read before the start of their episode, or after its end."""

from __future__ import annotations

from collections.abc import Callable

from headrace.schemas.events import EpisodeEnded, ObservationRecorded
from headrace.services.agent.requests import Answer

EARLY = 256
"""Largest number of episodes whose answers are kept before their start is read."""

Key = tuple[int, int]
"""A task's number, and a sample."""


class EarlyAnswers:
    """Answers that were read before their episode ran, by episode, in log order."""

    def __init__(self) -> None:
        self._kept: dict[Key, list[Answer]] = {}
        self._last: dict[tuple[int, int, int, int], ObservationRecorded] = {}
        """The last answer of each environment of the episodes that are over."""

    def keep(self, key: Key, answer: Answer) -> None:
        """Keeps an answer until its episode takes it."""
        self._kept.setdefault(key, []).append(answer)

    def observed(self, key: Key) -> list[ObservationRecorded]:
        """Returns all answers of an episode's environments, in log order."""
        kept = self._kept.get(key, ())
        return [answer for answer in kept if isinstance(answer, ObservationRecorded)]

    def take(self, key: Key) -> dict[int, dict[str, Answer]]:
        """Removes and returns an episode's answers, by attempt and call: the first one of each."""
        answers: dict[int, dict[str, Answer]] = {}
        for answer in self._kept.pop(key, ()):
            answers.setdefault(answer.attempt, {}).setdefault(answer.call, answer)
        return answers

    def end(self, key: Key) -> None:
        """Drops the answers to an episode that is over, but for the last one of each environment.

        All that is kept of that one is what a `close` of its environment needs.
        """
        for answer in self._kept.pop(key, ()):
            if isinstance(answer, ObservationRecorded):
                which = answer.task, answer.sample, answer.attempt, answer.partition
                if which not in self._last or answer.index >= self._last[which].index:
                    self._last[which] = _without_contents(answer)

    def drop_over(self, is_over: Callable[[int, int], bool]) -> list[ObservationRecorded]:
        """Drops the answers to episodes that are over, and all but the EARLY newest of the others.

        Returns the last answer of each environment of the episodes that are over. It has no
        contents.
        """
        for key in [key for key in self._kept if is_over(*key)]:
            self.end(key)
        for key in list(self._kept)[:-EARLY]:
            del self._kept[key]
        last, self._last = self._last, {}
        return list(last.values())


class EarlyEnds:
    """Outcomes and results that were read before the start of their task."""

    def __init__(self) -> None:
        self._outcomes: dict[int, dict[int, EpisodeEnded]] = {}
        """By task and sample: the first one of each. A task that has ended has none here."""
        self._tasks: set[int] = set()

    def add_outcome(self, outcome: EpisodeEnded) -> None:
        """Keeps the outcome of an episode, unless its task has ended."""
        if outcome.task not in self._tasks:
            self._outcomes.setdefault(outcome.task, {}).setdefault(outcome.sample, outcome)

    def add_result(self, number: int) -> None:
        """Notes that a task has ended."""
        self._tasks.add(number)
        self._outcomes.pop(number, None)

    def take_outcomes(self, number: int) -> dict[int, EpisodeEnded]:
        """Removes and returns a task's outcomes, by sample."""
        return self._outcomes.pop(number, {})

    def has_ended(self, number: int, sample: int | None = None) -> bool:
        """Whether a task has ended; with `sample`, whether that episode has."""
        return number in self._tasks or sample in self._outcomes.get(number, ())

    def clear(self) -> None:
        """Forgets all."""
        self._outcomes.clear()
        self._tasks.clear()


def _without_contents(answer: ObservationRecorded) -> ObservationRecorded:
    """Returns an answer with what names its environment and its place in the attempt alone."""
    return ObservationRecorded(
        task=answer.task,
        sample=answer.sample,
        attempt=answer.attempt,
        call=answer.call,
        index=answer.index,
        digest=answer.digest,
        partition=answer.partition,
    )

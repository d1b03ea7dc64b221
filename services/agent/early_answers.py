"""Answers whose episodes don't run in this worker: they haven't started yet, or are over."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from headrace.schemas.events import ObservationRecorded
from headrace.services.agent.requests import Answer

EARLY = 256
"""Largest number of episodes whose answers are kept before their start is read."""

Key = tuple[int, int]
"""A task's number, and a sample."""


class EarlyAnswers:
    """Answers that were read before their episode ran, by episode, in log order."""

    def __init__(self) -> None:
        self._kept: dict[Key, list[Answer]] = {}

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

    def drop_over(self, is_over: Callable[[int, int], bool]) -> list[ObservationRecorded]:
        """Drops the answers to episodes that are over, and all but the EARLY newest of the others.

        Returns the last answer of each environment of the episodes that are over.
        """
        over = [self._kept.pop(key) for key in list(self._kept) if is_over(*key)]
        for key in list(self._kept)[:-EARLY]:
            del self._kept[key]
        last: dict[tuple[int, int, int, int], ObservationRecorded] = {}
        for answer in chain.from_iterable(over):
            if isinstance(answer, ObservationRecorded):
                which = answer.task, answer.sample, answer.attempt, answer.partition
                if which not in last or answer.index >= last[which].index:
                    last[which] = answer
        return list(last.values())

"""Answers to episodes that don't run here: not yet, as far as is read, or not any more."""

from __future__ import annotations

from collections.abc import Callable

from headrace.schemas.events import ObservationRecorded
from headrace.services.agent.requests import Answer, last_observed

EARLY = 256
"""Most episodes of which answers are kept before their start is read, once caught up."""

Key = tuple[int, int]
"""Task number, sample."""


class EarlyAnswers:
    """What came before its episode was there to hear it, by episode, in log order."""

    def __init__(self) -> None:
        self._kept: dict[Key, list[Answer]] = {}

    def __len__(self) -> int:
        """Episodes that answers are kept of."""
        return len(self._kept)

    def keep(self, key: Key, answer: Answer) -> None:
        """Keeps an answer until its episode takes it."""
        self._kept.setdefault(key, []).append(answer)

    def take(self, key: Key) -> dict[int, dict[str, Answer]]:
        """An episode's answers, by attempt and call: of each the first."""
        answers: dict[int, dict[str, Answer]] = {}
        for answer in self._kept.pop(key, ()):
            answers.setdefault(answer.attempt, {}).setdefault(answer.call, answer)
        return answers

    def take_over(self, is_over: Callable[[int, int], bool]) -> list[ObservationRecorded]:
        """What environments last answered to episodes that are over. Of the others, the newest
        EARLY are kept."""
        over = [self._kept.pop(key) for key in list(self._kept) if is_over(*key)]
        for key in list(self._kept)[:-EARLY]:
            del self._kept[key]
        last = []
        for answers in over:
            newest = max(answer.attempt for answer in answers)
            last.append(last_observed(one for one in answers if one.attempt == newest))
        return [answer for answer in last if answer is not None]

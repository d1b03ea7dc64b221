"""Prints an episode while it is played."""

from __future__ import annotations

import json

from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    TaskSubmitted,
)
from headrace.services.operate.options import echo


class Transcript:
    """Prints each event as a headline and its text."""

    def task(self, submitted: TaskSubmitted) -> None:
        """Prints the task."""
        self._part(f"task {submitted.item_id}", submitted.payload)

    def event(self, event: Event) -> None:
        """Prints an event, if it says something new."""
        match event:
            case GenerationRequested():
                self._part("the agent asks", event.chat or event.text)
            case GenerationCompleted(failure=None):
                tokens = len(event.tokens) // 4
                self._part(f"the policy {event.policy} answers ({tokens} tokens)", event.text)
            case ActionRequested(kind="step"):
                self._part("the agent acts", str(json.loads(event.payload)["action"]))
            case ActionRequested(kind="score"):
                self._part(f"the agent asks the judge {event.environment.use}", event.payload)
            case ObservationRecorded(failure=None):
                self._part(f"the environment answers{_reward(event)}", event.text)
            case GenerationCompleted() | ObservationRecorded():
                assert event.failure is not None
                self._part(
                    f"failed: {event.failure.origin}: {event.failure.code}", event.failure.message
                )
            case EpisodeEnded():
                self._end(event)

    def say(self, line: str) -> None:
        """Prints a line to stderr."""
        echo(line, err=True)

    def _end(self, outcome: EpisodeEnded) -> None:
        reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:g}"
        self._part(
            f"the episode ended: {outcome.ending}, {reward}, attempts {outcome.attempts}",
            "" if outcome.failure is None else outcome.failure.message,
        )

    @staticmethod
    def _part(headline: str, text: str) -> None:
        echo(f"-- {headline}", bold=True)
        for line in text.splitlines():
            echo(f"   {line}")


def _reward(observation: ObservationRecorded) -> str:
    parts = [] if observation.reward is None else [f"reward {observation.reward:g}"]
    parts += [name for name in ("terminated", "truncated") if getattr(observation, name)]
    return f" ({', '.join(parts)})" if parts else ""

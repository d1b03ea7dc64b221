"""One episode of an agent whose environment and policies follow a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationRequested,
    Ref,
    TrajectoryRecorded,
)
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.memory.unread_answers import KeptAnswer
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.requests import Answer
from headrace.services.agent.stops import reached_limits
from headrace.services.base.types import Observation
from headrace.services.env.answers import answer_to
from headrace.services.operate.try_episode.players import Player

NAME = "conformance"
FAILURE = "lost_by_the_kit"
"""The code of a failure that the script asks for."""


@dataclass(frozen=True)
class Script:
    """What the environment and the policies do."""

    observations: tuple[str, ...]
    """The text of each observation, again from the first one after the last."""
    answers: tuple[str, ...]
    """The same for what the policies say."""
    steps: int
    """The step that ends the world."""
    fails: bool = False
    """Whether the first action fails."""
    silent: bool = False
    """Whether nothing is ever answered."""

    def turned(self, by: int) -> Script:
        """Returns another script: it begins with later texts, and has `by` more steps."""

        def turn(texts: tuple[str, ...]) -> tuple[str, ...]:
            first = by % len(texts)
            return texts[first:] + texts[:first]

        return replace(
            self,
            observations=turn(self.observations),
            answers=turn(self.answers),
            steps=self.steps + by,
        )

    def observation(self, action: ActionRequested) -> Observation:
        """Returns the answer to an action, which depends on its index alone."""
        if action.kind == "score":
            return Observation(reward=1.0)
        text = self.observations[action.index % len(self.observations)]
        if action.kind == "reset":
            return Observation(text=text)
        return Observation(text=text, reward=1.0, terminated=action.index >= self.steps)


@dataclass(eq=False)
class ScriptedEpisode:
    """Answers the requests of one episode as its script says."""

    script: Script
    started: EpisodeStarted
    setup: AgentSetup
    player: Player
    recorded: Mapping[str, Answer] = field(default_factory=dict)
    """Answers of an earlier worker, by call. The agent gets them again."""
    requests: dict[str, str] = field(default_factory=dict)
    """What the agent asked for in the first attempt, by call."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """What it got, by call."""
    scripted: set[str] = field(default_factory=set)
    """The calls that got an answer of the script. Others are demonstrations of the agent."""
    outcome: EpisodeEnded | None = None
    trajectory: TrajectoryRecorded | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the agent has asked for something."""
    attempts: int = 1
    """How many attempts asked for something."""
    seconds: float = 0.0
    limits: list[str] = field(default_factory=list)
    """The limits that stopped a request, by their endings."""
    _sent: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _error: BaseException | None = None

    async def play(self, beside: Callable[[EpisodeRun], Coroutine[Any, Any, None]]) -> None:
        """Plays the episode to its end. `beside` runs meanwhile, and may cancel it."""
        answers: dict[int, dict[str, KeptAnswer]] = {}
        if self.recorded:
            answers[0] = {**self.recorded}
        self.run = EpisodeRun(self._send, self.started, time.time(), self.setup, answers)
        self._begin(beside(self.run))
        reached_limits.set(self.limits)
        began = time.monotonic()
        try:
            await self.run.run()
        finally:
            self.seconds = time.monotonic() - began
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    async def _send(self, event: Event) -> Ref:
        self._sent += 1
        if isinstance(event, GenerationRequested | ActionRequested):
            self._request(event)
        elif isinstance(event, EpisodeEnded):
            self.outcome = event
        elif isinstance(event, TrajectoryRecorded):
            self.trajectory = event
        return Ref(topic=NAME, partition=0, offset=self._sent, digest=bytes(16))

    def _request(self, request: GenerationRequested | ActionRequested) -> None:
        if isinstance(request, ActionRequested) and request.kind == "close":
            return
        self.attempts = max(self.attempts, request.attempt + 1)
        if request.attempt == 0:
            self.requests[request.call] = _described(request)
            if isinstance(request, GenerationRequested) and request.demonstration is None:
                self.scripted.add(request.call)
        self.asked.set()
        if not self.script.silent:
            self._begin(self._answer(request))

    async def _answer(self, request: GenerationRequested | ActionRequested) -> None:
        answer: Answer | None
        if isinstance(request, GenerationRequested):
            answer = await self.player(request)
        elif self.script.fails:
            failure = Failure(
                origin="infrastructure", code=FAILURE, message="the kit asked for it",
                retryable=False,
            )  # fmt: skip
            answer = answer_to(request, Observation(), NAME, failure=failure)
        else:
            answer = answer_to(request, self.script.observation(request), NAME)
        assert answer is not None, "a script always answers"
        if request.attempt == 0:
            self.answers[request.call] = answer
        self.run.on_answer(answer)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self.run.cancel(f"{type(error).__name__}: {error}")


def _described(request: GenerationRequested | ActionRequested) -> str:
    """Returns a text that differs if the meaning of a request does."""
    if isinstance(request, GenerationRequested):
        said = request.chat or request.text
        return f"asks {request.policy} {said!r:.80} ({request.digest.hex()})"
    return f"{request.kind} {request.payload:.80} ({request.digest.hex()})"

"""One attempt at an episode: sends its requests, and hands out the first recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import DependencyError, TooLarge
from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
)
from headrace.services.agent.requests import Answer, Request, last_observed
from headrace.services.agent.stops import AttemptFailed, LogLost
from headrace.services.base.clock import now
from headrace.services.base.types import ENVIRONMENT_ERROR
from headrace.services.tasks.admission import refused

A = TypeVar("A", GenerationCompleted, ObservationRecorded)


Send = Callable[[Event], Awaitable[Ref]]
"""Writes an event to the log. Returns its reference once it is durable."""
SendPrompt = Callable[[GenerationRequested, str | None], AbstractAsyncContextManager[None]]
"""Writes a prompt to the partition of a worker that is free, and counts it as that worker's work
until the context ends. The text is the worker that gave the policy's last answer, if any."""


@dataclass(eq=False)
class Attempt:
    """An EpisodeRuntime. It sends a request only if the answer isn't recorded yet."""

    send: Send
    started: EpisodeStarted
    attempt: int
    score_s: Mapping[str, float]
    """Seconds that a judge has to answer, by its name, if the recipe limits them."""
    answers: dict[str, Answer]
    """Recorded answers that the agent has not asked for yet."""
    send_prompt: SendPrompt | None = None
    """Without it, the keys of prompts decide."""

    def __post_init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._action: ActionRequested | None = None
        self._over = False
        self._homes: dict[str, str] = {}
        """Policy to the worker that gave its last answer."""
        self.overdue = asyncio.Event()
        """Set when its agent asks something new after the deadline, which is not sent."""
        self.replays = self.was_begun
        """Whether an earlier owner began it, and its agent has sent nothing new yet."""

    @property
    def was_begun(self) -> bool:
        """Whether there are answers to requests that only an earlier owner made."""
        return bool(self.answers)

    @property
    def last_action(self) -> ActionRequested | ObservationRecorded | None:
        """The last request to the environment, or its last answer if there was no request."""
        return self._action or last_observed(self.answers.values())

    def take(self, answer: Answer) -> None:
        """Takes an answer to this attempt. If two have the same id, the first one counts."""
        future = self._waiting.pop(answer.call, None)
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self.answers.setdefault(answer.call, answer)

    def end(self) -> None:
        """Refuses requests from now on: the agent's code may still run, but must have no effect."""
        self._over = True

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """Returns the first recorded answer to a prompt, which is sent if there is none yet."""
        return await self._ask(request, GenerationCompleted)

    async def ask_teacher(self, request: GenerationRequested) -> GenerationCompleted:
        """Returns the first recorded answer to a score, even if it is a failure.

        The attempt has ended by then, so its agent can ask nothing any more.
        """
        return await self._first_answer(request, GenerationCompleted)

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """Returns the first recorded answer to an action, which is sent if there is none yet."""
        if request.kind == "score":
            return await self._ask_judge(request)
        if not self._over:
            self._action = request
        return await self._ask(request, ObservationRecorded)

    async def _ask_judge(self, request: ActionRequested) -> ObservationRecorded:
        """Returns a judge's answer. The attempt fails if it takes longer than the recipe allows."""
        judge = request.environment.use
        bound_s = self.score_s.get(judge)
        if bound_s is not None:
            expires_at = min(request.expires_at, int((now() + bound_s) * 1000))
            request = request.model_copy(update={"expires_at": expires_at})
        try:
            async with asyncio.timeout(bound_s):
                return await self._ask(request, ObservationRecorded)
        except TimeoutError as error:
            message = f"the judge {judge!r} did not answer call {request.call} within {bound_s:g} s"
            raise AttemptFailed.retryable("judge_silent", message) from error
        except AttemptFailed as failed:
            if failed.failure.code != ENVIRONMENT_ERROR:
                raise
            # The recipe may count exceptions of the environment, but a judge is not the policy's.
            failure = failed.failure.model_copy(update={"code": "judge_error"})
            raise AttemptFailed(failure) from failed

    async def _ask(self, request: Request, kind: type[A]) -> A:
        if self._over:
            message = f"call {request.call} came after the attempt's end"
            raise AttemptFailed.retryable("superseded", message)
        if request.call not in self.answers and now() * 1000 >= self.started.deadline:
            self.overdue.set()
            await asyncio.Event().wait()  # The run ends the attempt.
        answer = await self._first_answer(request, kind)
        if answer.failure is not None and answer.failure.origin != "policy":
            raise AttemptFailed(answer.failure)
        return answer

    async def _first_answer(self, request: Request, kind: type[A]) -> A:
        answer = self.answers.pop(request.call, None)
        if answer is None:
            answer = await self._answer_to(request)
        if isinstance(answer, GenerationCompleted) and answer.failure is None:
            self._homes[answer.policy] = answer.worker
        if not isinstance(answer, kind) or answer.digest != request.digest:
            raise AttemptFailed.retryable(
                "diverged",
                f"call {request.call} differs from the recorded one: the agent's code is not "
                "deterministic, or it has changed",
            )
        return answer

    async def _answer_to(self, request: Request) -> Answer:
        """Sends a request, and returns its first answer."""
        self.replays = False
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = future
        try:
            if self.send_prompt is None or isinstance(request, ActionRequested):
                await self.send(request)
                return await future
            async with self.send_prompt(request, self._homes.get(request.policy)):
                return await future
        except TooLarge as error:
            raise AttemptFailed(refused("too_large", str(error))) from error
        except DependencyError as error:
            raise LogLost(error) from error
        finally:
            self._waiting.pop(request.call, None)

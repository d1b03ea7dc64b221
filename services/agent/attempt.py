"""One attempt at an episode: sends its requests, and hands out the first recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeVar

from headrace.errors import DependencyError, TooLarge
from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
)
from headrace.services.agent.requests import Answer, Request, last_observed
from headrace.services.agent.stops import AttemptFailed, LogLost
from headrace.services.base.clock import now

A = TypeVar("A", GenerationCompleted, ObservationRecorded)


class Sends(Protocol):
    """Writes events to the log."""

    async def send(self, event: Event) -> Ref:
        """Writes one event. Returns its reference once it is durable."""


class Attempt:
    """An EpisodeRuntime. It sends a request only if the answer isn't recorded yet."""

    def __init__(
        self,
        outlet: Sends,
        started: EpisodeStarted,
        attempt: int,
        score_s: Mapping[str, float],
        answers: Mapping[str, Answer],
    ) -> None:
        """`score_s` limits how long judges may take; `answers` are those recorded so far."""
        self.started = started
        self.attempt = attempt
        self._outlet = outlet
        self._score_s = score_s
        self._answers = dict(answers)
        """Recorded answers that the agent has not asked for yet."""
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._action: ActionRequested | None = None
        self._over = False

    @property
    def was_begun(self) -> bool:
        """Whether there are answers to requests that only an earlier owner made."""
        return bool(self._answers)

    @property
    def last_action(self) -> ActionRequested | ObservationRecorded | None:
        """The last request to the environment, or its last answer if there was no request."""
        return self._action or last_observed(self._answers.values())

    def take(self, answer: Answer) -> None:
        """Takes an answer to this attempt. If two have the same id, the first one counts."""
        future = self._waiting.pop(answer.call, None)
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self._answers.setdefault(answer.call, answer)

    def end(self) -> None:
        """Refuses requests from now on: the agent's code may still run, but must have no effect."""
        self._over = True

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """Returns the first recorded answer to a prompt, which is sent if there is none yet."""
        return await self._ask(request, GenerationCompleted)

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
        bound_s = self._score_s.get(judge)
        if bound_s is not None:
            expires_at = min(request.expires_at, int((now() + bound_s) * 1000))
            request = request.model_copy(update={"expires_at": expires_at})
        try:
            async with asyncio.timeout(bound_s):
                return await self._ask(request, ObservationRecorded)
        except TimeoutError as error:
            message = f"the judge {judge!r} did not answer call {request.call} within {bound_s:g} s"
            raise _failed("judge_silent", message) from error

    async def _ask(self, request: Request, kind: type[A]) -> A:
        if self._over:
            raise _failed("superseded", f"call {request.call} came after the attempt's end")
        answer = self._answers.pop(request.call, None)
        if answer is None:
            answer = await self._send(request)
        if not isinstance(answer, kind) or answer.digest != request.digest:
            raise _failed(
                "diverged",
                f"call {request.call} differs from the recorded one: the agent's code is not "
                "deterministic, or it has changed",
            )
        if answer.failure is not None and answer.failure.origin != "policy":
            raise AttemptFailed(answer.failure)
        return answer

    async def _send(self, request: Request) -> Answer:
        """Sends a request, and returns its first answer."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = future
        try:
            await self._outlet.send(request)
            answer: Answer = await future
            return answer
        except TooLarge as error:
            raise AttemptFailed(too_large(error)) from error
        except DependencyError as error:
            raise LogLost(error) from error
        finally:
            self._waiting.pop(request.call, None)


def too_large(error: TooLarge) -> Failure:
    """Returns the failure of an episode with a record that is too large: a retry would not help."""
    return Failure(origin="operator", code="too_large", message=str(error))


def _failed(code: str, message: str) -> AttemptFailed:
    return AttemptFailed(
        Failure(origin="infrastructure", code=code, message=message, retryable=True)
    )

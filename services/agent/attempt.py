"""What one attempt asks, and what answers it: requests out, first recorded answers in."""

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
    """What a run may do to the log."""

    async def send(self, event: Event) -> Ref: ...


class Attempt:
    """An episode's Runtime. A request is sent only where its answer isn't recorded yet."""

    def __init__(
        self,
        outlet: Sends,
        started: EpisodeStarted,
        attempt: int,
        score_s: Mapping[str, float],
        answers: Mapping[str, Answer],
    ) -> None:
        """`score_s` bounds judges' answers; `answers` are those known before it begins, by call."""
        self.started = started
        self.attempt = attempt
        self._outlet = outlet
        self._score_s = score_s
        self._answers = dict(answers)
        """Those that nothing has asked for yet."""
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._action: ActionRequested | None = None
        self._over = False

    @property
    def taken_over(self) -> bool:
        """Whether there are answers that nothing has asked for: an owner before did."""
        return bool(self._answers)

    @property
    def last_action(self) -> ActionRequested | ObservationRecorded | None:
        """What was last asked of the environment; where nothing was, what it last answered."""
        # Where this owner has asked for nothing, one before it may have.
        return self._action or last_observed(self._answers.values())

    def take(self, answer: Answer) -> None:
        """Takes an answer to this attempt: the first of its id counts."""
        future = self._waiting.pop(answer.call, None)
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self._answers.setdefault(answer.call, answer)

    def end(self) -> None:
        """Refuses what is asked from now on: its agent's code may live on, and must not matter."""
        self._over = True

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """The first recorded answer to a prompt, which is sent unless it was answered before."""
        return await self._ask(request, GenerationCompleted)

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """The first recorded answer to an action, which is sent unless it was answered before."""
        if request.kind == "score":
            return await self._ask_judge(request)
        if not self._over:
            self._action = request
        return await self._ask(request, ObservationRecorded)

    async def _ask_judge(self, request: ActionRequested) -> ObservationRecorded:
        """A judge's answer. One that stays away longer than the recipe allows fails the attempt."""
        judge = request.environment.use
        bound_s = self._score_s.get(judge)
        if bound_s is not None:
            expires_at = min(request.expires_at, int((now() + bound_s) * 1000))
            request = request.model_copy(update={"expires_at": expires_at})
        try:
            async with asyncio.timeout(bound_s):
                return await self._ask(request, ObservationRecorded)
        except TimeoutError as error:
            message = f"{judge!r} did not answer call {request.call} within {bound_s:g} s"
            raise _failed("judge_silent", message) from error

    async def _ask(self, request: Request, kind: type[A]) -> A:
        if self._over:
            raise _failed("superseded", f"call {request.call} comes after the attempt's end")
        answer = self._answers.pop(request.call, None)
        if answer is None:
            answer = await self._send(request)
        if not isinstance(answer, kind) or answer.digest != request.digest:
            raise _failed(
                "diverged",
                f"call {request.call} was recorded with another meaning: the agent's code is not "
                "deterministic, or has changed",
            )
        if answer.failure is not None and answer.failure.origin != "policy":
            raise AttemptFailed(answer.failure)
        return answer

    async def _send(self, request: Request) -> Answer:
        """Sends a request, and waits for its first answer."""
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
    """Why an episode fails of which a record can't be held: no retry makes it smaller."""
    return Failure(origin="operator", code="too_large", message=str(error))


def _failed(code: str, message: str) -> AttemptFailed:
    return AttemptFailed(
        Failure(origin="infrastructure", code=code, message=message, retryable=True)
    )

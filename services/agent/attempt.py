"""One attempt at an episode: sends its requests, and hands out the first recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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
from headrace.services.agent.memory.unread_answers import KeptAnswer, UnreadAnswer, last_observed
from headrace.services.agent.requests import Answer, Request, sharing_names
from headrace.services.agent.stops import AttemptFailed, LogLost
from headrace.services.base.clock import now
from headrace.services.base.shown import shown
from headrace.services.base.types import ENVIRONMENT_ERROR, STEP_TIMEOUT
from headrace.services.tasks.admission import refused

A = TypeVar("A", GenerationCompleted, ObservationRecorded)


Send = Callable[[Event], Awaitable[Ref]]
"""Writes an event to the log. Returns its reference once it is durable."""
SendPrompt = Callable[[GenerationRequested, str | None], AbstractAsyncContextManager[None]]
"""Writes a prompt to the partition of a worker that is free, and counts it as that worker's work
until the context ends. The text is the worker that gave the policy's last answer, if any."""


class Wake:
    """An event that few wait for. Unlike asyncio's it takes no memory until somebody waits."""

    __slots__ = ("_future", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._future: asyncio.Future[None] | None = None

    @property
    def future(self) -> asyncio.Future[None]:
        """Done once it is set."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self.is_set:
                self._future.set_result(None)
        return self._future

    def set(self) -> None:
        """Wakes those who wait."""
        self.is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def clear(self) -> None:
        """Makes those wait who come from now on."""
        if self.is_set:
            self.is_set, self._future = False, None


@dataclass(eq=False, slots=True)
class Attempt:
    """An EpisodeRuntime. It sends a request only if the answer isn't recorded yet."""

    send: Send
    started: EpisodeStarted
    attempt: int
    score_s: Mapping[str, float]
    """Seconds that a judge has to answer, by its name, if the recipe limits them."""
    answers: dict[str, KeptAnswer]
    """Recorded answers that the agent has not asked for yet."""
    send_prompt: SendPrompt | None = None
    """Without it, the keys of prompts decide."""

    overdue: Wake = field(init=False, default_factory=Wake)
    """Set when its agent asks something new after the deadline, which is not sent."""
    replays: bool = field(init=False)
    """Whether an earlier owner began it, and its agent has sent nothing new yet."""
    _waiting: dict[str, asyncio.Future[Answer]] = field(init=False, default_factory=dict)
    _action: ActionRequested | None = field(init=False, default=None)
    _over: bool = field(init=False, default=False)
    _homes: dict[str, str] = field(init=False, default_factory=dict)
    """Policy to the worker that gave its last answer."""
    _seen: tuple[int, bytes | None] = field(init=False, default=(-1, None))
    """Index of the newest action whose answer the agent has, and the answer's digest."""

    def __post_init__(self) -> None:
        self.replays = self.was_begun

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
        asking = self._ask(request, GenerationCompleted)
        del request
        return await asking

    async def ask_teacher(self, request: GenerationRequested) -> GenerationCompleted:
        """Returns the first recorded answer to a score, even if it is a failure.

        The attempt has ended by then, so its agent can ask nothing any more.
        """
        return await self._first_answer(request, GenerationCompleted)

    async def ask_to_collect(self, request: ActionRequested) -> ObservationRecorded:
        """Returns the first recorded answer to a `collect`. The attempt's agent has ended by then.

        Raises AttemptFailed if the files can't be had: nothing that the policy did is a failure.
        """
        self._action = request = self._following(request)
        answer = await self._first_answer(request, ObservationRecorded)
        failure = answer.failure
        if failure is not None and failure.code in (ENVIRONMENT_ERROR, STEP_TIMEOUT):
            # The recipe may count these against the policy, but its last action was answered.
            failure = failure.model_copy(update={"code": "collect_error"})
        if failure is not None:
            raise AttemptFailed(failure)
        return answer

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """Returns the first recorded answer to an action, which is sent if there is none yet."""
        if request.kind == "score":
            return await self._ask_judge(request)
        request = self._following(request)
        if not self._over:
            self._action = request
        answer = await self._ask(request, ObservationRecorded)
        if request.index > self._seen[0]:
            self._seen = request.index, shown(answer)
        return answer

    def _following(self, request: ActionRequested) -> ActionRequested:
        """Returns an action with the digest of the answer before it, if the agent has that one."""
        index, digest = self._seen
        if request.index != index + 1 or digest is None:
            return request
        return sharing_names(request, {**request.__dict__, "after": digest})

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
        # A prompt may have 100 KiB: only the frame that sends it has it.
        asking = self._first_answer(request, kind)
        del request
        answer = await asking
        if answer.failure is not None and answer.failure.origin != "policy":
            raise AttemptFailed(answer.failure)
        return answer

    async def _first_answer(self, request: Request, kind: type[A]) -> A:
        call, digest = request.call, request.digest
        kept = self.answers.pop(call, None)
        asking = kept.read() if isinstance(kept, UnreadAnswer) else None
        if kept is None:
            asking = self._answer_to(request)
        del request
        answer = kept if asking is None else await asking
        if isinstance(answer, GenerationCompleted) and answer.failure is None:
            self._homes[answer.policy] = answer.worker
        if not isinstance(answer, kind) or answer.digest != digest:
            raise AttemptFailed.retryable(
                "diverged",
                f"call {call} differs from the recorded one: the agent's code is not "
                "deterministic, or it has changed",
            )
        return answer

    async def _answer_to(self, request: Request) -> Answer:
        """Sends a request, and returns its first answer."""
        self.replays = False
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        call = request.call
        self._waiting[call] = future
        try:
            if self.send_prompt is None or isinstance(request, ActionRequested):
                await self.send(request)
                del request
                return await future
            async with self.send_prompt(request, self._homes.get(request.policy)):
                del request
                return await future
        except TooLarge as error:
            raise AttemptFailed(refused("too_large", str(error))) from error
        except DependencyError as error:
            raise LogLost(error) from error
        finally:
            self._waiting.pop(call, None)

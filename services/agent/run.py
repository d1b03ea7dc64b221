"""Runs one episode to its end: attempts, limits, deadline, and the records that close it.

An episode that is owned always ends. Its end is written in order: the trajectory, delivered, then
the outcome that names it. A higher attempt in the log moves the run to that attempt; an outcome in
the log stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from schemas.errors import TooLarge
from schemas.events import (
    ActionRequested,
    Ending,
    EnvironmentUse,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
)
from services.agent.episode import Agent, Episode, EpisodeStopped, exits_contained
from services.agent.records import AgentSetup, following, outcome_of, trajectory_of
from services.clock import now
from services.errors import DependencyError
from services.shard import ShardClosed

logger = logging.getLogger(__name__)

Answer = GenerationCompleted | ObservationRecorded
A = TypeVar("A", GenerationCompleted, ObservationRecorded)
MESSAGE = 1_000
"""Most characters of an error's text: a TaskEnded holds those of all its samples."""
AGENT_CLOSE_S = 1.0
"""Seconds that an agent's coroutine has to end once it is cancelled."""


class AttemptFailed(BaseException):
    """An attempt can't go on; not an Exception, so that an agent's code lets it pass."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


class _LogLost(BaseException):
    """A request could not be sent: the worker must end. Like AttemptFailed, no Exception."""

    def __init__(self, error: DependencyError) -> None:
        super().__init__(str(error))
        self.error = error


class Sends(Protocol):
    """What a run may do to the log."""

    async def send(self, event: Event) -> Ref: ...


@dataclass(eq=False)
class EpisodeRun:
    """One live episode. `answers` are those recorded before it was taken over."""

    outlet: Sends
    started: EpisodeStarted
    recorded_at: float
    setup: AgentSetup
    answers: dict[int, dict[str, Answer]] = field(default_factory=dict)
    attempt: int = 0
    task: asyncio.Task[None] | None = None
    """What runs it, once it is spawned."""

    def __post_init__(self) -> None:
        self.attempt = max(self.started.attempt, *self.answers, 0)
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._failures: list[Failure] = []
        self._moved = asyncio.Event()
        self._cancelled: Failure | None = None
        self._episode: Episode | None = None
        self._action: ActionRequested | None = None

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer of this episode: the first of its id counts."""
        if answer.attempt < self.attempt:
            return
        recorded = self.answers.setdefault(answer.attempt, {})
        if answer.attempt > self.attempt:
            recorded.setdefault(answer.call, answer)
            self.attempt = answer.attempt
            self._moved.set()
        elif (future := self._waiting.pop(answer.call, None)) is not None and not future.done():
            future.set_result(answer)
        else:
            recorded.setdefault(answer.call, answer)

    def cancel(self, reason: str) -> None:
        """Ends the episode as cancelled."""
        self._cancelled = self._cancelled or cancelled(reason)
        self._moved.set()

    def stop(self) -> None:
        """Ends the run without a word: the episode's outcome is in the log."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Runs to the outcome's delivery."""
        ending, failure = await self._attempts()
        ref = None
        try:
            ref = await self._record_trajectory(ending)
        except TooLarge as error:
            ending, failure = "failed", _too_large(error)
        outcome = outcome_of(
            self.started,
            self.setup,
            self._episode,
            ending,
            failure,
            ref,
            attempt=self.attempt,
            seconds=max(0.0, now() - self.recorded_at),
        )
        await self.outlet.send(outcome)

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """The first recorded answer to a prompt, which is sent unless it was answered before."""
        return await self._ask(request, GenerationCompleted)

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """The first recorded answer to an action, which is sent unless it was answered before."""
        if request.kind == "score":
            return await self._ask_judge(request)
        self._action = request
        return await self._ask(request, ObservationRecorded)

    async def _ask_judge(self, request: ActionRequested) -> ObservationRecorded:
        """A judge's answer. One that stays away longer than the recipe allows fails the attempt."""
        judge = request.environment.use
        bound_s = self.setup.score_s.get(judge)
        if bound_s is not None:
            expires_at = min(request.expires_at, int((now() + bound_s) * 1000))
            request = request.model_copy(update={"expires_at": expires_at})
        try:
            async with asyncio.timeout(bound_s):
                return await self._ask(request, ObservationRecorded)
        except TimeoutError as error:
            raise AttemptFailed(
                Failure(
                    origin="infrastructure",
                    code="judge_silent",
                    message=f"{judge!r} did not answer call {request.call} within {bound_s:g} s",
                    retryable=True,
                )
            ) from error

    async def _ask(self, request: GenerationRequested | ActionRequested, kind: type[A]) -> A:
        answer = self.answers.get(request.attempt, {}).pop(request.call, None)
        if answer is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting[request.call] = future
            try:
                await self.outlet.send(request)
                answer = await future
            except TooLarge as error:
                raise AttemptFailed(_too_large(error)) from error
            except DependencyError as error:
                raise _LogLost(error) from error
            finally:
                self._waiting.pop(request.call, None)
        if not isinstance(answer, kind) or answer.digest != request.digest:
            raise AttemptFailed(
                Failure(
                    origin="infrastructure",
                    code="diverged",
                    message=f"call {request.call} was recorded with another meaning: the agent's "
                    f"code is not deterministic, or has changed",
                    retryable=True,
                )
            )
        if answer.failure is not None and answer.failure.origin != "policy":
            raise AttemptFailed(answer.failure)
        return answer

    async def _attempts(self) -> tuple[Ending, Failure | None]:
        """Attempts until one ends of itself, all are used up, or time is."""
        while True:
            attempt = self.attempt
            try:
                ending = await self._one_attempt()
                return ending, self._cancelled if ending == "cancelled" else None
            except AttemptFailed as failed:
                failure = failed.failure
            except TimeoutError:
                return "deadline", self._deadline_failure()
            if self.attempt > attempt:
                continue
            self._failures.append(failure)
            if not failure.retryable or attempt + 1 >= self.started.submitted.attempts:
                return "failed", failure
            await self._close_environment()
            self.attempt = max(self.attempt, attempt + 1)

    async def _one_attempt(self) -> Ending:
        """Runs the agent's coroutine until it ends or something outside ends it."""
        self._moved.clear()
        self._action = None
        self._episode = None  # the attempt before is not this one's story, even if it ends here
        if self._cancelled is not None:
            return "cancelled"
        if self.answers.get(self.attempt) and not self.setup.replayable:
            raise AttemptFailed(
                Failure(
                    origin="infrastructure",
                    code="taken_over",
                    message="the worker before has ended, and its agent can't be run again",
                    retryable=True,
                )
            )
        self._episode = Episode(self, self.setup.options)
        agent = asyncio.create_task(_play(self.setup.agent, self._episode))
        moved = asyncio.create_task(self._moved.wait())
        left_s = max(0.0, self.started.deadline / 1000 - now())
        try:
            await asyncio.wait({agent, moved}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
            finished = agent.done()
            if not finished:
                agent.cancel()
                await asyncio.wait({agent}, timeout=AGENT_CLOSE_S)
        if self._cancelled is not None:
            return "cancelled"
        if not finished:
            if self._moved.is_set():
                raise AttemptFailed(Failure(origin="infrastructure", code="superseded"))
            raise TimeoutError
        return self._ending_of(agent)

    def _ending_of(self, agent: asyncio.Future[None]) -> Ending:
        error = _error_of(agent)
        if error is None:
            return "finished"
        if isinstance(error, EpisodeStopped):
            return error.ending
        if isinstance(error, AttemptFailed | ShardClosed):
            raise error
        # The log out of reach is no failure of the agent's code: the worker ends, to start anew.
        if isinstance(error, _LogLost):
            raise error.error
        where = f"task {self.started.task}, sample {self.started.sample}"
        logger.error("the agent's code failed (%s)", where, exc_info=error)
        raise AttemptFailed(
            Failure(
                origin="infrastructure",
                code="agent_error",
                message=f"{type(error).__name__}: {error}"[:MESSAGE],
                retryable=True,
            )
        )

    def _deadline_failure(self) -> Failure:
        """Time ran out while an answer was owed, so it is not held against the policy."""
        return Failure(
            origin="infrastructure",
            code="deadline",
            message=f"no end within {self.started.submitted.deadline_s} s",
        )

    async def _close_environment(self) -> None:
        # Where this owner has asked for nothing, one before it may have.
        last = self._action or last_observed(self.answers.get(self.attempt, {}).values())
        self._action = None
        if last is not None:
            await self.outlet.send(close_after(last, self.started.submitted.environment))

    async def _record_trajectory(self, ending: Ending) -> Ref | None:
        """Writes what there is of the last attempt; None where nothing was done."""
        await self._close_environment()
        episode = self._episode
        if episode is None:
            return None
        trajectory = trajectory_of(
            self.started,
            self.setup,
            episode,
            ending,
            attempt=self.attempt,
            failures=self._failures,
            began_ms=int(self.recorded_at * 1000),
        )
        return await self.outlet.send(trajectory)


async def _play(agent: Agent, episode: Episode) -> None:
    """Runs an agent's code. Where it asks the process to end, that is its failure, no more."""
    with exits_contained():
        await agent(episode)


def _error_of(agent: asyncio.Future[None]) -> BaseException | None:
    """What an agent's coroutine raised: CancelledError too, where its own code leaked one."""
    try:
        return agent.exception()
    except asyncio.CancelledError as error:
        return error


def _too_large(error: TooLarge) -> Failure:
    return Failure(origin="operator", code="too_large", message=str(error))


def cancelled(reason: str) -> Failure:
    """Why an episode was cancelled: somebody asked for it."""
    return Failure(origin="operator", code="cancelled", message=reason[:MESSAGE])


def last_observed(answers: Iterable[Answer]) -> ObservationRecorded | None:
    """The newest answer of an environment among these."""
    observed = (answer for answer in answers if isinstance(answer, ObservationRecorded))
    return max(observed, key=lambda answer: answer.index, default=None)


def close_after(
    last: ActionRequested | ObservationRecorded, environment: EnvironmentUse | None
) -> ActionRequested:
    """What ends the environment of an attempt: `last` is its newest action or answer known.

    An environment is found by its attempt: the record names none where it isn't known any more.
    """
    expires_at = 0
    if isinstance(last, ActionRequested):
        environment, expires_at = last.environment, last.expires_at
    return ActionRequested(
        task=last.task,
        sample=last.sample,
        attempt=last.attempt,
        call=f"{last.call}.close",
        index=following(last.index),
        kind="close",
        environment=environment or EnvironmentUse(use=""),
        expires_at=expires_at,
        digest=last.digest,
    )

"""Runs one episode to its end: attempts, limits, deadline, and the records that close it.

An episode always ends while a worker owns it. The records of its end are written one after the
other: the trajectory, delivered, then the outcome that names it. A higher attempt in the log moves
the run to that attempt. An outcome in the log stops the run.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from numbers import Real
from typing import Any

from headrace.errors import TooLarge
from headrace.schemas.events import Ending, EpisodeStarted, Failure, Ref
from headrace.services.agent.attempt import Attempt, Send, SendPrompt
from headrace.services.agent.awaiting import check_awaited
from headrace.services.agent.episode import Agent, Episode, NoScore
from headrace.services.agent.records import (
    AgentSetup,
    EarnedReward,
    earned_reward,
    outcome_of,
    trajectory_of,
    without_details,
)
from headrace.services.agent.requests import Answer, close_after
from headrace.services.agent.stops import (
    AttemptFailed,
    Blamed,
    EpisodeStopped,
    LogLost,
    error_of,
    exits_contained,
)
from headrace.services.agent.teacher_scores import ask_teachers
from headrace.services.base.clock import now
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.types import ENVIRONMENT_ERROR, STEP_TIMEOUT, check_names
from headrace.services.tasks.admission import refused
from headrace.services.worker.shard import ShardClosed

logger = logging.getLogger(__name__)

MESSAGE = 1_000
"""Largest number of characters of an error: a TaskEnded contains those of all its samples."""
WHOLE_TIME = 0.9
"""An episode that begins with less than this share of its time left did not have the whole time."""
EXCEPTIONS = {("agent", "agent_error"), ("environment", ENVIRONMENT_ERROR)}
"""The origins and codes of failures by an exception of the user's code."""
REPLAY_S = 10.0
"""Seconds that an agent has after the deadline to run again with answers that are recorded."""
AGENT_CLOSE_S = 1.0
"""Seconds that an agent's coroutine has to end after it is cancelled."""


@dataclass(eq=False)
class EpisodeRun:
    """One live episode. `answers` are those recorded so far, by attempt and call."""

    send: Send
    started: EpisodeStarted
    recorded_at: float
    setup: AgentSetup
    answers: dict[int, dict[str, Answer]]
    send_prompt: SendPrompt | None = None
    """As for `Attempt`."""
    task: asyncio.Task[None] | None = None
    """The asyncio task that runs it, once it is spawned."""

    def __post_init__(self) -> None:
        self.attempt = max(self.started.attempt, *self.answers, 0)
        """The highest attempt that is known."""
        self._attempts: dict[int, Attempt] = {}
        self._current = self._attempt(self.attempt)
        """The attempt that runs or ran last. A higher one may have appeared since."""
        self._failures: list[Failure] = []
        self._moved = asyncio.Event()
        self._cancelled: Failure | None = None
        self._cancelling = asyncio.Event()
        self._episode: Episode | None = None
        self._had_whole_time = False

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer to this episode. If two have the same id, the first one counts."""
        if answer.attempt < self.attempt:
            return
        self._attempt(answer.attempt).take(answer)
        if answer.attempt > self.attempt:
            self.attempt = answer.attempt
            self._moved.set()

    def cancel(self, reason: str) -> None:
        """Ends the episode as cancelled."""
        self._cancelled = self._cancelled or refused("cancelled", reason[:MESSAGE])
        self._cancelling.set()
        self._moved.set()

    def stop(self) -> None:
        """Ends the run and writes nothing: the episode's outcome is in the log."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Runs the episode until its outcome is delivered."""
        left_s = self.started.deadline / 1000 - now()
        prompt = left_s >= WHOLE_TIME * self.started.submitted.deadline_s
        self._had_whole_time = prompt and not self._current.was_begun
        ending, failure = await self._run_attempts()
        await self._close_environment()
        earned = earned_reward(self.started, self.setup, self._episode, ending, failure)
        if self._is_learned(earned) and (stopped := await self._ask_teachers()) is not None:
            ending, failure = stopped
            earned = earned_reward(self.started, self.setup, self._episode, ending, failure)
        ref = None
        try:
            ref = await self._record_trajectory(ending, earned)
        except TooLarge as error:
            ending, failure = "failed", refused("too_large", str(error))
            earned = earned_reward(self.started, self.setup, self._episode, ending, failure)
        outcome = outcome_of(
            self.started,
            ending,
            failure,
            attempt=self._current.attempt,
            seconds=max(0.0, now() - self.recorded_at),
            episode=self._episode,
            trajectory=ref,
            earned=earned,
        )
        try:
            await self.send(outcome)
        except TooLarge as error:
            logger.warning("an outcome is written without its details: %s", error)
            await self.send(without_details(outcome))

    def _attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            answers = self.answers.pop(number, {})
            self._attempts[number] = Attempt(
                self.send, self.started, number, self.setup.score_s, answers, self.send_prompt
            )
        return self._attempts[number]

    async def _run_attempts(self) -> tuple[Ending, Failure | None]:
        """Makes attempts until one ends by itself, all are used up, or the deadline passes."""
        while True:
            try:
                ending = await self._one_attempt()
                return ending, self._cancelled if ending == "cancelled" else None
            except AttemptFailed as failed:
                failure = failed.failure
            except TimeoutError:
                return "deadline", self._failure_of_deadline()
            number = self._current.attempt
            if self.attempt > number:
                continue
            self._failures.append(failure)
            counted = self._counted(failure)
            if counted is not None and self._episode is not None and self._episode.turns:
                # What the policy did may be the cause. Another attempt would give it a second try.
                return counted, None
            if not failure.retryable or number + 1 >= self.started.submitted.attempts:
                return "failed", failure
            await self._close_environment()
            self.attempt = max(self.attempt, number + 1)

    def _counted(self, failure: Failure) -> Ending | None:
        """Returns how a failure ends an episode of which the recipe says that it counts."""
        settings = self.setup.settings
        if failure.code == STEP_TIMEOUT and settings.timeouts == "unfinished":
            return "step_timeout"
        raised = (failure.origin, failure.code) in EXCEPTIONS
        return "exception" if raised and settings.exceptions == "unfinished" else None

    def _failure_of_deadline(self) -> Failure | None:
        """Returns why the deadline excludes the episode, or None if it counts as unfinished.

        It does not count if the policy did not have the whole time: an earlier attempt failed, its
        worker died, or the run was paused.
        """
        first = self._current.attempt == self.started.attempt
        counts = self.setup.settings.timeouts == "unfinished"
        if counts and self._had_whole_time and first:
            return None
        message = f"the episode did not end within {self.started.submitted.deadline_s} s"
        return Failure(origin="infrastructure", code="deadline", message=message)

    async def _one_attempt(self) -> Ending:
        """Runs the agent's coroutine until it ends, or is cancelled, superseded or overdue."""
        self._moved.clear()
        attempt = self._current = self._attempt(self.attempt)
        self._episode = None  # an earlier attempt's turns must not count if this one ends at once
        if self._cancelled is not None:
            return "cancelled"
        if attempt.was_begun and not self.setup.replayable:
            raise AttemptFailed.retryable(
                "worker_lost", "the worker that ran this agent has ended, and it can't be replayed"
            )
        self._episode = Episode(attempt, self.setup.options)
        agent = asyncio.create_task(_play(self.setup.agent, self._episode))
        moved = asyncio.create_task(self._moved.wait())
        overdue = asyncio.create_task(attempt.overdue.wait())
        left_s = max(0.0, self.started.deadline / 1000 - now())
        try:
            await _first_of({agent, moved}, left_s)
            if attempt.replays:
                # It may have ended in time: an earlier owner died while a teacher read it.
                await _first_of({agent, moved, overdue}, REPLAY_S)
        finally:
            moved.cancel()
            overdue.cancel()
            attempt.end()
            finished = agent.done()
            if not finished:
                agent.cancel()
                await asyncio.wait({agent}, timeout=AGENT_CLOSE_S)
            if agent.done():
                error_of(agent)  # retrieved, or asyncio would log that it never was
        if self._cancelled is not None:
            return "cancelled"
        if not finished:
            if self._moved.is_set():
                raise AttemptFailed.retryable("superseded", "a higher attempt is in the log")
            raise TimeoutError
        return self._ending_of(agent)

    def _ending_of(self, agent: asyncio.Future[None]) -> Ending:
        error = error_of(agent)
        if self._episode is not None and (error is None or isinstance(error, EpisodeStopped)):
            error = _names_error(self._episode) or error
        if error is None:
            return "finished"
        if isinstance(error, EpisodeStopped):
            return error.ending
        if isinstance(error, AttemptFailed | ShardClosed):
            raise error
        # It is not the agent's fault that the log can't be reached: the worker ends and restarts.
        if isinstance(error, LogLost):
            raise error.error
        logger.error(
            "the agent's code failed (task %d, sample %d)",
            self.started.task,
            self.started.sample,
            exc_info=error,
        )
        message = REDACTOR.text(f"{type(error).__name__}: {error}", MESSAGE)
        # A judge without a score may have one in the next attempt. All else is the agent's bug.
        origin: Blamed = "infrastructure" if isinstance(error, NoScore) else "agent"
        raise AttemptFailed.retryable("agent_error", message, origin)

    async def _close_environment(self) -> None:
        last = self._current.last_action
        if last is not None:
            await self.send(close_after(last, self.started.submitted.environment))

    def _is_learned(self, earned: EarnedReward) -> bool:
        """Whether a policy with a teacher may be trained on the episode."""
        train = self.started.submitted.purpose == "train" and bool(self.setup.teachers)
        return train and earned.reward is not None and not earned.masked

    async def _ask_teachers(self) -> tuple[Ending, Failure] | None:
        """Adds the teachers' logprobs to the turns. Returns the other ending if that fails."""
        assert self._episode is not None
        turns = self._episode.turns
        asking = asyncio.create_task(ask_teachers(self._current, turns, self.setup.teachers))
        cancelled = asyncio.create_task(self._cancelling.wait())
        try:
            await asyncio.wait({asking, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if self._cancelled is not None:
                return "cancelled", self._cancelled
            for call, logprobs in asking.result().items():
                turns[call].turn = turns[call].turn.model_copy(update={"teacher": logprobs})
        except AttemptFailed as failed:
            return "failed", failed.failure
        except LogLost as lost:
            raise lost.error from None
        finally:
            cancelled.cancel()
            asking.cancel()
        return None

    async def _record_trajectory(self, ending: Ending, earned: EarnedReward) -> Ref | None:
        """Writes the trajectory of the last attempt. Returns None if the attempt did nothing."""
        episode = self._episode
        if episode is None:
            return None
        trajectory = trajectory_of(
            self.started,
            self.setup,
            episode,
            ending,
            earned=earned,
            attempt=self._current.attempt,
            failures=self._failures,
            began_ms=int(self.recorded_at * 1000),
        )
        return await self.send(trajectory)


async def _first_of(tasks: set[asyncio.Task[Any]], timeout_s: float) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _names_error(episode: Episode) -> ValueError | None:
    """Returns what is wrong with the named rewards or metrics. Clears those that are no numbers."""
    for kind, values in (("rewards", episode.rewards), ("metrics", episode.metrics)):
        wrong = [name for name, value in values.items() if not isinstance(value, Real)]
        if wrong:
            given = type(values[wrong[0]]).__name__
            values.clear()
            return ValueError(f"episode.{kind}[{wrong[0]!r}] is a {given}, not a number")
    try:
        check_names(episode.rewards)
        check_names(episode.metrics)
    except ValueError as error:
        return ValueError(f"the named rewards or metrics of the episode have {error}")
    return None


async def _play(agent: Agent, episode: Episode) -> None:
    """Runs an agent's code. If the code asks the process to exit, only the attempt fails."""
    with exits_contained():
        await agent(episode)
        check_awaited()

"""Runs one episode to its end: attempts, limits, deadline, and the records that close it.

An episode always ends while a worker owns it. The records of its end are written one after the
other: the trajectory, delivered, then the outcome that names it. A higher attempt in the log moves
the run to that attempt. An outcome in the log stops the run.

Most episodes sleep: their agents wait for an answer. `begin` starts an episode so that meanwhile it
has its agent's task and a timer, and no other task.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import TooLarge
from headrace.schemas.events import Ending, EpisodeStarted, Failure, Ref
from headrace.services.agent.artifacts.collecting import collect
from headrace.services.agent.attempt import Attempt, Send, SendPrompt, Wake
from headrace.services.agent.episode import Episode
from headrace.services.agent.memory.lone_agent import LoneAgent, play
from headrace.services.agent.memory.unread_answers import KeptAnswer
from headrace.services.agent.records import (
    AgentSetup,
    EarnedReward,
    earned_reward,
    ending_of_failure,
    names_error,
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
    NoScore,
    error_of,
)
from headrace.services.agent.teacher_scores import ask_teachers
from headrace.services.base.clock import now
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.texts import message_of
from headrace.services.tasks.admission import refused
from headrace.services.worker.shard import ShardClosed, ShardContext

logger = logging.getLogger(__name__)

MESSAGE = 1_000
"""Largest number of characters of an error: a TaskEnded contains those of all its samples."""
WHOLE_TIME = 0.9
"""An episode that begins with less than this share of its time left did not have the whole time."""
REPLAY_S = 10.0
"""Seconds that an agent has after the deadline to run again with answers that are recorded."""
AGENT_CLOSE_S = 1.0
"""Seconds that an agent's coroutine has to end after it is cancelled."""


@dataclass(eq=False, slots=True)
class EpisodeRun:
    """One live episode. `answers` are those recorded so far, by attempt and call."""

    send: Send
    started: EpisodeStarted
    recorded_at: float
    setup: AgentSetup
    answers: dict[int, dict[str, KeptAnswer]]
    send_prompt: SendPrompt | None = None
    """As for `Attempt`."""
    task: asyncio.Task[None] | None = None
    """The asyncio task that runs it. None while only its agent runs."""
    attempt: int = field(init=False)
    """The highest attempt that is known."""
    _attempts: dict[int, Attempt] = field(init=False, default_factory=dict)
    _current: Attempt = field(init=False)
    """The attempt that runs or ran last. A higher one may have appeared since."""
    _failures: list[Failure] = field(init=False, default_factory=list)
    _moved: Wake = field(init=False, default_factory=Wake)
    """Set when a higher attempt appears, or the episode is cancelled."""
    _cancelled: Failure | None = field(init=False, default=None)
    _cancelling: Wake = field(init=False, default_factory=Wake)
    _episode: Episode | None = field(init=False, default=None)
    _had_whole_time: bool = field(init=False, default=False)
    _agent: asyncio.Task[None] | None = field(init=False, default=None)
    """The agent's task, as long as no task waits for it."""
    _lone: LoneAgent | None = field(init=False, default=None)
    """Set while only the agent has a task."""

    def __post_init__(self) -> None:
        self.attempt = max(self.started.attempt, *self.answers, 0)
        self._current = self._attempt(self.attempt)

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer to this episode. If two have the same id, the first one counts."""
        if answer.attempt < self.attempt:
            return
        self._attempt(answer.attempt).take(answer)
        if answer.attempt > self.attempt:
            self.attempt = answer.attempt
            self._moved.set()
            self._go_on()

    def cancel(self, reason: str) -> None:
        """Ends the episode as cancelled."""
        self._cancelled = self._cancelled or refused("cancelled", reason[:MESSAGE])
        self._cancelling.set()
        self._moved.set()
        self._go_on()

    def stop(self) -> None:
        """Ends the run and writes nothing: the episode's outcome is in the log."""
        if self._lone is not None:
            self._lone.cancel()
            self._lone = None
        if self._agent is not None:
            self._current.end()
            self._agent.add_done_callback(error_of)  # or asyncio would log that nobody took it
            self._agent.cancel()
        if self.task is not None:
            self.task.cancel()

    def begin(self, context: ShardContext) -> None:
        """Starts the agent now, and `run` in a task as soon as there is more to do than to wait."""
        self._lone = LoneAgent(context, self._left_s(), self._go_on)
        if self._cancelled is not None or self._is_lost():
            self._go_on()
        else:
            self._note_time()
            self._lone.start(self._begin_attempt, self._go_on)

    def _go_on(self, _: object = None) -> None:
        """Runs in a task of its own from now on."""
        if self._lone is not None and not self._lone.is_closed:
            lone, self._lone = self._lone, None
            name = f"episode {self.started.task}/{self.started.sample}"
            self.task = lone.spawn(self.run(), name)

    async def run(self) -> None:
        """Runs the episode until its outcome is delivered."""
        if self._agent is None:
            self._note_time()
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

    def _note_time(self) -> None:
        """Notes whether the agent has the whole time: nobody began before, and it is not late."""
        prompt = self._left_s() >= WHOLE_TIME * self.started.submitted.deadline_s
        self._had_whole_time = prompt and not self._current.was_begun

    def _left_s(self) -> float:
        return max(0.0, self.started.deadline / 1000 - now())

    def _is_lost(self) -> bool:
        """Whether the newest attempt can't go on, because an earlier owner began it."""
        return self._attempt(self.attempt).was_begun and not self.setup.replayable

    def _attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            answers = self.answers.pop(number, {})
            self.answers, self._attempts = {}, {}  # No lower attempt runs again.
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
                await self._close_environment()  # Whoever moved on may not know where it is.
                continue
            self._failures.append(failure)
            counted = ending_of_failure(self.setup.settings, failure)
            if counted is not None and self._episode is not None and self._episode.turns:
                # What the policy did may be the cause. Another attempt would give it a second try.
                return counted, None
            if not failure.retryable or number + 1 >= self.started.submitted.attempts:
                return "failed", failure
            await self._close_environment()
            self.attempt = max(self.attempt, number + 1)

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
        agent = self._agent
        if agent is None:
            self._moved.clear()
            self._current = self._attempt(self.attempt)
            self._episode = None  # an earlier attempt's must not count if this one ends at once
            if self._cancelled is not None:
                return "cancelled"
            if self._is_lost():
                lost = "the worker that ran this agent has ended, and it can't be replayed"
                raise AttemptFailed.retryable("worker_lost", lost)
            agent = self._begin_attempt()
        self._agent = None
        attempt = self._current
        try:
            await _first_of({agent, self._moved.future}, self._left_s())
            if attempt.replays:
                # It may have ended in time: an earlier owner died while a teacher read it.
                await _first_of({agent, self._moved.future, attempt.overdue.future}, REPLAY_S)
        finally:
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
            if self._moved.is_set:
                raise AttemptFailed.retryable("superseded", "a higher attempt is in the log")
            raise TimeoutError
        ending = self._ending_of(agent)
        assert self._episode is not None
        if await collect(self.started, attempt, self._episode, self._moved):
            return ending
        if self._cancelled is None:
            raise AttemptFailed.retryable("superseded", "a higher attempt is in the log")
        return "cancelled"

    def _begin_attempt(self) -> asyncio.Task[None]:
        """Starts the agent's coroutine with the newest attempt."""
        self._episode = Episode(self._current, self.setup.options)
        self._agent = asyncio.create_task(play(self.setup.agent, self._episode), name="agent")
        return self._agent

    def _ending_of(self, agent: asyncio.Future[None]) -> Ending:
        error = error_of(agent)
        wrong = None if self._episode is None else names_error(self._episode)
        if error is None or isinstance(error, EpisodeStopped):
            error = wrong or error
        if error is None:
            return "finished"
        if isinstance(error, EpisodeStopped):
            return error.ending
        if isinstance(error, AttemptFailed | ShardClosed):
            raise error
        # It is not the agent's fault that the log can't be reached: the worker ends and restarts.
        if isinstance(error, LogLost):
            raise error.error
        where = self.started.task, self.started.sample
        logger.error("the agent's code failed (task %d, sample %d)", *where, exc_info=error)
        message = REDACTOR.text(message_of(error), MESSAGE)
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
        waited: set[asyncio.Future[Any]] = {asking, self._cancelling.future}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._cancelled is not None:
                return "cancelled", self._cancelled
            for call, logprobs in asking.result().items():
                turns[call].turn = turns[call].turn.model_copy(update={"teacher": logprobs})
        except AttemptFailed as failed:
            return "failed", failed.failure
        except LogLost as lost:
            raise lost.error from None
        finally:
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


async def _first_of(tasks: set[asyncio.Future[None]], timeout_s: float) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

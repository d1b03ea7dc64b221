"""The agent worker's state of one partition: its unfinished tasks, and their live episodes.

A start is held until its task's TaskEnded is in the log. TaskEnded is built from outcomes read
back in log order, so whoever owns the partition builds the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    Failure,
    GenerationCompleted,
    ObservationRecorded,
    TaskEnded,
    TaskSubmitted,
)
from headrace.services.agent.crash_isolation.isolation import DEATHS, IsolatedEpisode, Isolation
from headrace.services.agent.early_answers import EarlyAnswers, Key
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup, refused, task_ended
from headrace.services.agent.requests import Answer, close_after
from headrace.services.log.event_log import Delivery
from headrace.services.tasks.cancellation import Cancellations, TaskId, id_of
from headrace.services.worker.shard import ShardContext

logger = logging.getLogger(__name__)

LIVE = Gauge("headrace_live_episodes", "Episodes that run in this worker.")
ENDED = Counter("headrace_episodes_ended_total", "Episodes ended by this worker.", ["ending"])

RUN_ENDING = "the run is ending"


@dataclass(eq=False)
class _Task:
    """A task with a start that is held."""

    submitted: TaskSubmitted
    starts: dict[int, Delivery[EpisodeStarted]] = field(default_factory=dict)
    releases: list[Callable[[], None]] = field(default_factory=list)
    outcomes: dict[int, EpisodeEnded] = field(default_factory=dict)
    """First outcome of each sample, in log order."""
    closing: bool = False


class AgentShard:
    """Starts, answers, outcomes and results of one partition in; episodes run to their end."""

    def __init__(
        self,
        context: ShardContext,
        agents: Mapping[str, AgentSetup],
        refusal: Callable[[TaskSubmitted], Failure | None],
        ending: asyncio.Event,
        isolation: Isolation,
        cancellations: Cancellations,
    ) -> None:
        """`agents` by their keys in the recipe; `refusal` says why a task can't be run by it.

        Once `ending` is set, episodes end cancelled.
        """
        self._context = context
        self._agents = agents
        self._refusal = refusal
        self._ending = ending
        self._isolation = isolation
        self._cancellations = cancellations
        self._tasks: dict[int, _Task] = {}
        self._numbers: dict[TaskId, int] = {}
        """Of the tasks that run; a duplicate's is not among them."""
        self._runs: dict[Key, EpisodeRun | IsolatedEpisode] = {}
        self._early_answers = EarlyAnswers()
        self._early_outcomes: dict[int, dict[int, EpisodeEnded]] = {}
        self._ended: set[int] = set()
        self._newest = -1
        """Highest number of a task that has started: they start in their order, or nearly."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles a start, an answer, an outcome or a result of this partition."""
        event = delivery.event
        if isinstance(event, EpisodeStarted):
            self._on_start(delivery)
        elif isinstance(event, GenerationCompleted | ObservationRecorded):
            self._on_answer(event)
        elif isinstance(event, EpisodeEnded):
            self._on_outcome(event)
        elif isinstance(event, TaskEnded):
            self._on_result(event)

    async def on_caught_up(self) -> None:
        """Takes up each unfinished episode where the log leaves it; apart if owners died of one."""
        apart = self._context.deaths >= DEATHS
        for task in list(self._tasks.values()):
            for sample in list(task.starts):
                self._launch(task, sample, apart=apart)
            self._maybe_close(task)
        isolated_episodes = [run for run in self._runs.values() if isinstance(run, IsolatedEpisode)]
        if isolated_episodes:
            logger.warning(
                "%d owners of partition %d died: its %d open episodes run apart",
                self._context.deaths,
                self._context.partition.number,
                len(isolated_episodes),
            )
            self._context.spawn(self._isolation.run(self._context, isolated_episodes), "suspects")
        self._close_over()
        self._early_outcomes.clear()
        self._ended.clear()
        self._cancellations.subscribe(self._on_cancelled)
        self._context.spawn(self._cancel_when_ending(), "ending")

    async def aclose(self) -> None:
        """Nothing to say: unfinished episodes are taken up by the next owner."""
        self._cancellations.unsubscribe(self._on_cancelled)
        LIVE.dec(len(self._runs))
        self._runs.clear()

    def _on_start(self, delivery: Delivery[EpisodeStarted]) -> None:
        event = delivery.event
        self._newest = max(self._newest, event.task)
        if event.task in self._ended:
            return
        task = self._tasks.get(event.task)
        if task is None:
            outcomes = self._early_outcomes.pop(event.task, {})
            task = self._tasks[event.task] = _Task(event.submitted, outcomes=outcomes)
            if event.verdict is None:
                self._numbers[id_of(event.submitted)] = event.task
        if event.sample in task.starts:
            return
        task.starts[event.sample] = delivery
        task.releases.append(self._context.hold(delivery))
        if self._context.caught_up:
            self._launch(task, event.sample)
            self._close_over()

    def _on_answer(self, answer: Answer) -> None:
        key = answer.task, answer.sample
        if (run := self._runs.get(key)) is not None:
            run.on_answer(answer)
        else:
            self._early_answers.keep(key, answer)
            if self._context.caught_up:
                self._close_over()

    def _is_over(self, number: int, sample: int) -> bool:
        """Whether an episode has ended, as far as is read here."""
        task = self._tasks.get(number)
        return number <= self._newest if task is None else sample in task.outcomes

    def _close_over(self) -> None:
        """Ends the environments that answered to episodes that are over.

        What they answer a former owner has asked: after the episode's `close`, or unknown to who
        ended it. Nobody else would free their slots before the deadline.
        """
        if over := self._early_answers.take_over(self._is_over):
            self._context.spawn(self._close_all(over), "close what is over")

    async def _close_all(self, last: Sequence[ObservationRecorded]) -> None:
        for answer in last:
            task = self._tasks.get(answer.task)
            environment = None if task is None else task.submitted.environment
            await self._context.send(close_after(answer, environment))

    def _on_outcome(self, outcome: EpisodeEnded) -> None:
        task = self._tasks.get(outcome.task)
        if task is None:
            if not self._context.caught_up:
                early = self._early_outcomes.setdefault(outcome.task, {})
                early.setdefault(outcome.sample, outcome)
            return
        task.outcomes.setdefault(outcome.sample, outcome)
        if self._context.caught_up:
            self._stop((outcome.task, outcome.sample))
            self._maybe_close(task)

    def _on_result(self, result: TaskEnded) -> None:
        self._newest = max(self._newest, result.task)
        if not self._context.caught_up:
            self._ended.add(result.task)
        task = self._tasks.pop(result.task, None)
        if task is None:
            return
        if self._numbers.get(id_of(task.submitted)) == result.task:
            del self._numbers[id_of(task.submitted)]
        for sample in task.starts:
            self._stop((result.task, sample))
        for release in task.releases:
            release()

    def _launch(self, task: _Task, sample: int, *, apart: bool = False) -> None:
        """Runs an episode, unless its outcome is in the log. `apart` leaves it to the isolation."""
        if sample in task.outcomes:
            return
        delivery = task.starts[sample]
        started = delivery.event
        verdict = started.verdict or self._refusal(started.submitted)
        if verdict is not None:
            self._context.spawn(self._refuse(started, verdict), f"refuse {started.task}")
            return
        answers = self._early_answers.take((started.task, sample))
        setup = self._agents[started.submitted.agent]
        # A black box is apart already: it plays in a process of its own.
        kind = IsolatedEpisode if apart and setup.replayable else EpisodeRun
        run = kind(self._context, started, delivery.recorded_at, setup, answers)
        self._runs[started.task, sample] = run
        LIVE.inc()
        if self._ending.is_set():
            run.cancel(RUN_ENDING)
        if (reason := self._cancellations.reason(started.submitted)) is not None:
            run.cancel(reason)
        if isinstance(run, EpisodeRun):
            run.task = self._context.spawn(run.run(), f"episode {started.task}/{sample}")

    async def _refuse(self, started: EpisodeStarted, verdict: Failure) -> None:
        """Ends what the scheduler would not have run."""
        await self._context.send(refused(started, verdict))

    def _stop(self, key: Key) -> None:
        """Ends a run whose outcome is in the log, whoever wrote it."""
        run = self._runs.pop(key, None)
        if run is not None:
            LIVE.dec()
            run.stop()

    def _maybe_close(self, task: _Task) -> None:
        """Writes the task's TaskEnded once every sample's outcome is in the log."""
        if task.closing or len(task.outcomes) < task.submitted.samples or not task.starts:
            return
        task.closing = True
        number = next(iter(task.starts.values())).event.task
        self._context.spawn(self._close(number, task), f"task {number}")

    async def _close(self, number: int, task: _Task) -> None:
        outcomes = tuple(task.outcomes.values())
        for outcome in outcomes:
            ENDED.labels(outcome.ending).inc()
        await self._context.send(task_ended(number, task.submitted, outcomes))

    def _on_cancelled(self, task_id: TaskId, reason: str) -> None:
        number = self._numbers.get(task_id)
        if number is not None:
            for sample in self._tasks[number].starts:
                if (run := self._runs.get((number, sample))) is not None:
                    run.cancel(reason)

    async def _cancel_when_ending(self) -> None:
        await self._ending.wait()
        for run in self._runs.values():
            run.cancel(RUN_ENDING)

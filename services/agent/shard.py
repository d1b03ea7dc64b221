"""The agent worker's state of one partition: its unfinished tasks, and their live episodes.

A start is held until its task's TaskEnded is in the log. TaskEnded is built from outcomes that were
read back in log order, so every owner of the partition builds the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge

from headrace.errors import TooLarge
from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.services.agent.crash_isolation.isolation import DEATHS, IsolatedEpisode, Isolation
from headrace.services.agent.early_answers import EarlyAnswers, EarlyEnds, EnvironmentCloser, Key
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.memory.shared_starts import SharedStarts
from headrace.services.agent.memory.unread_answers import AnswerReader, UnreadAnswer
from headrace.services.agent.records import AgentSetup, refused, task_ended, without_details
from headrace.services.agent.requests import Answer
from headrace.services.agent.routing.action_routes import ActionRoutes, Location
from headrace.services.agent.routing.episode_locations import EpisodeLocations
from headrace.services.agent.routing.prompt_routes import PromptRoutes
from headrace.services.log.event_log import Delivery
from headrace.services.tasks.cancellation import Cancellations, TaskId
from headrace.services.worker.shard import ShardContext

logger = logging.getLogger(__name__)

LIVE = Gauge("headrace_live_episodes", "Episodes that run in this worker.")
ENDED = Counter("headrace_episodes_ended_total", "Episodes ended by this worker.", ["ending"])

RUN_ENDING = "the run is ending"


@dataclass(eq=False, slots=True)
class _Task:
    """A task with a held start."""

    submitted: TaskSubmitted
    starts: dict[int, tuple[EpisodeStarted, float]] = field(default_factory=dict)
    """Sample to its start, and when that was recorded, in seconds since the epoch."""
    releases: list[Callable[[], None]] = field(default_factory=list)
    outcomes: dict[int, EpisodeEnded] = field(default_factory=dict)
    """The first outcome of each sample, in log order."""
    closing: bool = False


@dataclass(eq=False)
class AgentShard:
    """Reads starts, answers, outcomes and results of one partition, and runs its episodes."""

    context: ShardContext
    agents: Mapping[str, AgentSetup]
    """The recipe's agents, by key."""
    refusal: Callable[[TaskSubmitted], Failure | None]
    """Returns why the recipe can't run a task, or None if it can."""
    ending: asyncio.Event
    """After it is set, all episodes end as cancelled."""
    isolation: Isolation
    cancellations: Cancellations
    routes: PromptRoutes
    action_routes: ActionRoutes
    reader: AnswerReader

    def __post_init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._numbers: dict[TaskId, int] = {}
        """The numbers of the tasks that run. Duplicates of a task are not among them."""
        self._runs: dict[Key, EpisodeRun | IsolatedEpisode] = {}
        self._locations: dict[Key, EpisodeLocations] = {}
        """By episode that runs here."""
        self._early_answers = EarlyAnswers(self.reader)
        self._closer = EnvironmentCloser(
            self.context, self._early_answers, self._has_ended, self._environment_of
        )
        self._shared = SharedStarts()
        self._early_ends = EarlyEnds()

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles a start, an answer, an outcome or a result of this partition."""
        event = delivery.event
        if isinstance(event, EpisodeStarted):
            self._on_start(delivery)
        elif isinstance(event, GenerationCompleted | ObservationRecorded):
            if self.context.caught_up:
                now_s = asyncio.get_running_loop().time()
                if isinstance(event, GenerationCompleted):
                    self.routes.on_answer(event, now_s)
                else:
                    self.action_routes.on_answer(event, now_s)
            self._on_answer(delivery)
        elif isinstance(event, EpisodeEnded):
            self._on_outcome(event)
        elif isinstance(event, TaskEnded):
            self._on_result(event)

    async def on_caught_up(self) -> None:
        """Continues each unfinished episode, in isolation if several owners died."""
        isolate = self.context.deaths >= DEATHS
        for task in list(self._tasks.values()):
            for sample in list(task.starts):
                self._launch(task, sample, isolate=isolate)
            self._maybe_close(task)
        isolated = [run for run in self._runs.values() if isinstance(run, IsolatedEpisode)]
        if isolated:
            logger.warning(
                "%d owners of partition %d died: its %d open episodes run in isolation",
                self.context.deaths,
                self.context.partition.number,
                len(isolated),
            )
            self.isolation.add(isolated)
        self._closer.close_over()
        self._early_ends.trim()
        self.cancellations.subscribe(self._on_cancelled)
        self.context.spawn(self._cancel_when_ending(), "ending")

    async def aclose(self) -> None:
        """Drops all episodes. The partition's next owner continues the unfinished ones."""
        self.cancellations.unsubscribe(self._on_cancelled)
        LIVE.dec(len(self._runs))
        for run in self._runs.values():
            run.stop()
        self._runs.clear()
        self._locations.clear()

    def _on_start(self, delivery: Delivery[EpisodeStarted]) -> None:
        event = delivery.event
        if self._early_ends.has_ended(event.task):
            return
        task = self._tasks.get(event.task)
        event = self._shared.of(event, None if task is None else task.submitted)
        if task is None:
            outcomes = self._early_ends.take_outcomes(event.task)
            task = self._tasks[event.task] = _Task(event.submitted, outcomes=outcomes)
            if event.verdict is None:
                self._numbers[self.cancellations.id_of(event.submitted)] = event.task
        if event.sample in task.starts:
            return
        task.starts[event.sample] = event, delivery.recorded_at
        task.releases.append(self.context.hold(delivery))
        if self.context.caught_up:
            self._launch(task, event.sample)
            self._closer.close_over()

    def _on_answer(self, delivery: Delivery[Answer]) -> None:
        answer = delivery.event
        key = answer.task, answer.sample
        if (run := self._runs.get(key)) is not None:
            if isinstance(answer, ObservationRecorded):
                other = self._locations[key].on_answer(answer)
                if other or (answer.partition >= 0 and answer.attempt < run.attempt):
                    self._closer.close([answer])
            if isinstance(run, EpisodeRun):
                run.on_answer(answer)
            else:
                run.on_answer(answer, UnreadAnswer.of(delivery, self.reader))
        else:
            self._early_answers.keep(key, delivery, asyncio.get_running_loop().time())
            if self.context.caught_up:
                self._closer.close_over()
            elif self._has_ended(*key):
                self._early_answers.end(key)

    def _has_ended(self, number: int, sample: int) -> bool:
        """Whether the outcome of an episode or the result of its task is known."""
        if (task := self._tasks.get(number)) is not None:
            return sample in task.outcomes
        return self._early_ends.has_ended(number, sample)

    def _environment_of(self, number: int) -> EnvironmentUse | None:
        task = self._tasks.get(number)
        return None if task is None else task.submitted.environment

    def _on_outcome(self, outcome: EpisodeEnded) -> None:
        task = self._tasks.get(outcome.task)
        if task is not None:
            task.outcomes.setdefault(outcome.sample, outcome)
        key = outcome.task, outcome.sample
        if not self.context.caught_up:
            if task is None:
                self._early_ends.add_outcome(outcome)
            self._early_answers.end(key)
        elif task is not None:
            self._stop(key)
            self._maybe_close(task)

    def _on_result(self, result: TaskEnded) -> None:
        self._early_ends.add_result(result.task)
        if self.context.caught_up:
            self._early_ends.trim()
        else:
            for outcome in result.outcomes:
                self._early_answers.end((result.task, outcome.sample))
        task = self._tasks.pop(result.task, None)
        if task is None:
            return
        if self._numbers.get(named := self.cancellations.id_of(task.submitted)) == result.task:
            del self._numbers[named]
        for sample in task.starts:
            self._stop((result.task, sample))
        for release in task.releases:
            release()

    def _launch(self, task: _Task, sample: int, *, isolate: bool = False) -> None:
        """Runs an episode unless its outcome is in the log; with `isolate`, in a child process."""
        if sample in task.outcomes:
            return
        started, recorded_at = task.starts[sample]
        verdict = started.verdict or self.refusal(started.submitted)
        if verdict is not None:
            ended = refused(started, verdict)
            self.context.spawn(self.context.send(ended), f"refuse {started.task}")
            return
        locations = self._locations[started.task, sample] = EpisodeLocations()
        observed = self._early_answers.observed((started.task, sample))
        if others := [answer for answer in observed if locations.on_answer(answer)]:
            self._closer.close(others)
        answers = self._early_answers.take((started.task, sample))
        setup = self.agents[started.submitted.agent]
        run: EpisodeRun | IsolatedEpisode
        # An agent that can't be replayed already runs outside this process.
        if isolate and setup.replayable:
            run = IsolatedEpisode(self.context, started, recorded_at, answers, self._send)
        else:
            run = EpisodeRun(self._send, started, recorded_at, setup, answers, self._send_prompt)
        self._runs[started.task, sample] = run
        LIVE.inc()
        if self.ending.is_set():
            run.cancel(RUN_ENDING)
        if (reason := self.cancellations.reason(started.submitted)) is not None:
            run.cancel(reason)
        if isinstance(run, EpisodeRun):
            run.begin(self.context)

    async def _send(self, event: Event) -> Ref:
        """Writes an event, an action to the partition of its environment."""
        partition = self._partition_of(event) if isinstance(event, ActionRequested) else None
        if isinstance(event, TrajectoryRecorded | EpisodeEnded):
            self._locations.get((event.task, event.sample), EpisodeLocations()).end()
        return await self.context.send(event, partition)

    def _partition_of(self, action: ActionRequested) -> int:
        """Returns the partition for an action. A reset or a score goes to whoever is free.

        Without reports it has the number of this partition: another team's env worker may answer in
        the partition of `observations` with the number of the action's.
        """
        own, now_s = self.context.partition.number, asyncio.get_running_loop().time()
        if action.kind == "score":
            chosen = self.action_routes.choose(action, (), now_s)
            return own if chosen is None else chosen.partition
        locations = self._locations.get((action.task, action.sample), EpisodeLocations())
        if action.kind == "reset" and locations.location(action.attempt) is None:
            chosen = self.action_routes.choose(action, locations.workers(), now_s)
            locations.sent(action.attempt, chosen or Location("", own))
        location = locations.location(action.attempt)
        if location is None:
            return own
        if action.kind == "close":
            locations.closed(action.attempt, location.partition)
            self.action_routes.on_close(action.environment.use, location.worker)
        return location.partition

    @asynccontextmanager
    async def _send_prompt(
        self, request: GenerationRequested, home: str | None
    ) -> AsyncIterator[None]:
        now_s = asyncio.get_running_loop().time()
        with self.routes.route(request, home, now_s) as partition:
            await self.context.send(request, partition)
            del request
            yield

    def _stop(self, key: Key) -> None:
        """Ends a run whose outcome is in the log, whichever worker wrote it."""
        run = self._runs.pop(key, None)
        self._locations.pop(key, None)
        if run is not None:
            LIVE.dec()
            run.stop()

    def _maybe_close(self, task: _Task) -> None:
        """Writes the task's TaskEnded once every sample's outcome is in the log."""
        if task.closing or len(task.outcomes) < task.submitted.samples or not task.starts:
            return
        task.closing = True
        number = next(iter(task.starts.values()))[0].task
        self.context.spawn(self._close(number, task), f"task {number}")

    async def _close(self, number: int, task: _Task) -> None:
        outcomes = tuple(task.outcomes.values())
        for outcome in outcomes:
            ENDED.labels(outcome.ending).inc()
        try:
            await self.context.send(task_ended(number, task.submitted, outcomes))
        except TooLarge as error:
            logger.warning("a result is written without its outcomes' details: %s", error)
            short = tuple(without_details(outcome) for outcome in outcomes)
            await self.context.send(task_ended(number, task.submitted, short))

    def _on_cancelled(self, task_id: TaskId, reason: str) -> None:
        number = self._numbers.get(task_id)
        if number is not None:
            for sample in self._tasks[number].starts:
                if (run := self._runs.get((number, sample))) is not None:
                    run.cancel(reason)

    async def _cancel_when_ending(self) -> None:
        await self.ending.wait()
        for run in self._runs.values():
            run.cancel(RUN_ENDING)

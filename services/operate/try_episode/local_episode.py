"""Plays one episode in this process: the agent's and the environment's code are those of a run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationRequested,
    ObservationRecorded,
    Ref,
    TaskSubmitted,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.agents import load_agents
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.gateway.clients import ClientAgent
from headrace.services.agent.records import AgentSetup
from headrace.services.base.clock import now
from headrace.services.env.environment import Claim
from headrace.services.env.handle import Handle, score
from headrace.services.env.instances import Instances
from headrace.services.env.service import load_environments
from headrace.services.env.setup import Opening, Setup
from headrace.services.models.blobs import BlobStore, LocalBlobStore
from headrace.services.operate.try_episode.players import Player
from headrace.services.operate.try_episode.transcript import Transcript
from headrace.services.tasks.artifact_store import ArtifactStore
from headrace.services.tasks.data_sets import items_by_epoch
from headrace.services.tasks.source import SOURCE
from headrace.services.tasks.task_maker import make_alone

NAME = "try"
"""The namespace and the instance of what is tried."""


async def play(recipe: Recipe, item: int, player: Player, transcript: Transcript) -> EpisodeEnded:
    """Plays one episode of an item and prints it. Returns its outcome.

    Raises UsageError if the recipe or the item can't be used.
    """
    with TemporaryDirectory(prefix="headrace-try-") as folder:
        return await _play(recipe, item, player, transcript, LocalBlobStore(Path(folder)))


async def _play(
    recipe: Recipe, item: int, player: Player, transcript: Transcript, blobs: BlobStore
) -> EpisodeEnded:
    submitted = _task(recipe, item, blobs)
    # Nothing is trained on what is tried, so no teacher is asked.
    setup = replace(load_agents(recipe)[submitted.agent], teachers={})
    if isinstance(setup.agent, ClientAgent):
        raise UsageError(
            f"the agent {submitted.agent!r} waits for clients of a gateway, so it can't be tried "
            "here: `headrace run` starts the gateway"
        )
    store = ArtifactStore(blobs, recipe.artifacts)
    environments = load_environments(recipe, NAME, Instances(_drop, NAME), store)
    transcript.task(submitted)
    try:
        for environment in environments.values():
            if isinstance(environment, Opening):
                await environment.open()
        started = EpisodeStarted(
            task=0, sample=0, submitted=submitted, seed=submitted.seed,
            deadline=int((now() + submitted.deadline_s) * 1000),
        )  # fmt: skip
        return await LocalEpisode(environments, player, transcript.event).play(started, setup)
    finally:
        for environment in environments.values():
            await environment.close_pool()


def _task(recipe: Recipe, number: int, blobs: BlobStore) -> TaskSubmitted:
    tasks = recipe.tasks
    found = next(
        itertools.islice(items_by_epoch(tasks.use, tasks.options, tasks.epochs), number, None), None
    )
    if found is None:
        raise UsageError(f"--item {number}: the data set {tasks.use!r} has fewer items")
    task_id, epoch, item = found
    return make_alone(recipe, SOURCE, item, task_id, epoch, blobs)


async def _drop(event: object) -> None:
    """Drops an event about an instance."""


@dataclass(eq=False)
class LocalEpisode:
    """Answers the requests of one episode, as the log and its workers do in a run."""

    environments: Mapping[str, Setup]
    player: Player
    on_event: Callable[[Event], None]
    """Gets each event of the episode."""
    run: EpisodeRun | None = None
    outcome: EpisodeEnded | None = None
    handles: dict[int, Handle] = field(default_factory=dict)
    """The open environment of each attempt."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    error: BaseException | None = None
    """What ended the work beside the episode."""
    sent: int = 0

    async def play(self, started: EpisodeStarted, setup: AgentSetup) -> EpisodeEnded:
        """Plays the episode with an agent. Returns its outcome."""
        self.run = EpisodeRun(self.send, started, now(), setup, {})
        try:
            await self.run.run()
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome

    async def send(self, event: Event) -> Ref:
        """Takes an event that the episode writes."""
        self.on_event(event)
        if isinstance(event, GenerationRequested):
            self._begin(self._generate(event))
        elif isinstance(event, ActionRequested):
            self._act(event)
        elif isinstance(event, EpisodeEnded):
            self.outcome = event
        self.sent += 1
        return Ref(topic=NAME, partition=0, offset=self.sent, digest=bytes(16))

    async def _generate(self, request: GenerationRequested) -> None:
        assert self.run is not None
        answer = await self.player(request)
        if answer is None:
            self.run.cancel("no more answers were entered")
            return
        self.on_event(answer)
        self.run.on_answer(answer)

    def _act(self, action: ActionRequested) -> None:
        setup = self.environments.get(action.environment.use)
        if setup is None:
            raise UsageError(
                f"environment {action.environment.use!r} is external: another team's worker serves "
                "it, so it can't be tried here"
            )
        claim = Claim(0, 0, action.attempt, 0, self.sent, action.expires_at / 1000)
        if action.kind == "score":
            self._begin(self._score(setup, action, claim))
            return
        handle = self.handles.get(action.attempt)
        if action.kind == "close":
            if handle is not None:
                handle.end()
            return
        if handle is None:
            handle = self.handles[action.attempt] = Handle(
                setup, action, self._observed, NAME, claim
            )
            handle.task = self._begin(handle.run())
        handle.put(action)

    async def _score(self, setup: Setup, action: ActionRequested, claim: Claim) -> None:
        await self._observed(await score(setup, action, claim, NAME))

    async def _observed(self, observation: ObservationRecorded) -> None:
        assert self.run is not None
        self.on_event(observation)
        self.run.on_answer(observation)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self.run is not None
            self.error = self.error or error
            self.run.cancel(f"{type(error).__name__}: {error}")

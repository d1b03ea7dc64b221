"""A whole deployment in virtual time.

What decides is the product: SchedulerCore starts tasks, PromptRoutes and WorkerLoads choose a
worker for each prompt, GroupAssembler closes groups, BatchAssembler makes batches. What they decide
about is a model: engines (`engines.py`), the consumer group (`prompt_topic.py`), links, the trainer
and the environments, here.

It has no agents' code, no failures of environments other than the loss of their instances, and no
broker: a hop takes HOP_S, and to or from another region also its delay. A reader there gets the
next records only when its next fetch has reached Kafka, so a record waits for up to two delays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    GenerationRequested,
    PolicyPublished,
    PolicyUse,
    Ref,
    Sampling,
    TaskEnded,
    TaskSubmitted,
    Use,
)
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.routing.prompt_routes import PromptRoutes
from headrace.services.scheduler.core import SchedulerCore
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.groups import GroupAssembler
from tests.scale.engines import POLICY, SimulatedEpisode, SimulatedPrompt, SimulatedWorker
from tests.scale.fleet import Fleet, Pool, Region
from tests.scale.fluid import Events
from tests.scale.measured import Measured
from tests.scale.prompt_topic import PromptTopic
from tests.scale.simulated_weights import WeightsModel

HOP_S = 0.002
"""From the writer of a record to its reader (docs/benchmarks.md: 1.75 to 1.95 ms)."""
BEGAN_S = 1_000_000.0
QUEUED = 4_096
"""Tasks that wait in the scheduler, as far as there are more."""
FIELDS = 1_000
"""Bytes of a record besides its tokens."""


def recipe_of(fleet: Fleet) -> Recipe:
    """Returns the recipe that the cores run."""
    policy: dict[str, object] = {"model": "tiny-llama", "engine": {"slots": fleet.slots}}
    if fleet.training is None:
        policy["training"] = False
    else:
        policy["batches"] = {
            "groups": fleet.training.groups,
            "prefetch": fleet.training.prefetch,
            "max_staleness": fleet.training.max_staleness,
        }
    return parse_recipe(
        {
            "name": "scale",
            "pool_partitions": fleet.partitions,
            "tasks": {"use": "count", "samples": fleet.work.samples, "attempts": fleet.attempts},
            "scheduler": {"live_episodes": fleet.live},
            "policies": {POLICY: policy},
        },
        "tests.scale",
    )


class DeploymentWorld:
    """Runs a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, work = fleet, fleet.work
        self.events = Events()
        self.events.now_s = BEGAN_S
        self.measured = Measured(fleet, BEGAN_S)
        recipe = recipe_of(fleet)
        self._work = work
        self._chance = Random(fleet.seed)
        self._core = SchedulerCore(recipe)
        self._groups = GroupAssembler(recipe)
        self._batches = None if fleet.training is None else BatchAssembler(recipe, POLICY)
        self._routes = [
            PromptRoutes([POLICY], fleet.partitions, lambda: fleet.agents, seed=number)
            for number in range(fleet.agents)
        ]
        self._topic = PromptTopic(self.events, fleet.partitions, self._report_soon)
        self._workers: list[SimulatedWorker] = []
        self._weights = WeightsModel(self.events, fleet, self._workers)
        self._published = 0
        self._trains: list[int] = []
        self._training = False
        self._submitted = 0
        self._started: dict[int, EpisodeStarted] = {}
        self._outcomes: dict[int, list[EpisodeEnded]] = {}
        self._offset = 0
        self._checks_at_s: float | None = None
        self._assembles_s = 0.0
        """When batches are looked at next, if nothing happens before."""

    def run(self) -> Measured:
        """Runs until the time is over or the work is done."""
        for pool in self.fleet.pools:
            for _ in range(pool.workers):
                self.events.after(pool.joins_s, lambda pool=pool: self._join(pool))  # type: ignore[misc]
        self.events.after(0.0, self._publish_first)
        self.events.run(BEGAN_S + self.fleet.seconds, self._is_done)
        self.measured.end(self.events.now_s, self._workers)
        return self.measured

    def _is_done(self) -> bool:
        fleet = self.fleet
        tasks_done = fleet.tasks is not None and self.measured.tasks >= fleet.tasks
        return tasks_done or (fleet.versions is not None and self._published >= fleet.versions)

    # Workers

    def _join(self, pool: Pool) -> None:
        name = str(len(self._workers))
        worker = SimulatedWorker(name, pool, self.fleet, self.events, self._on_generated)
        worker.version = worker.newest = self._published
        self._workers.append(worker)
        self._topic.join(worker)
        self.events.after(self._chance.random(), lambda: self._report_each_second(worker))
        if self.fleet.losses.inference_per_h:
            gone_s = self._chance.expovariate(self.fleet.losses.inference_per_h / 3600)
            self.events.after(gone_s, lambda: self._lose(worker))

    def _lose(self, worker: SimulatedWorker) -> None:
        self.measured.lost_workers[worker.name] = self.events.now_s
        self._topic.lose(worker)
        self.events.after(self.fleet.losses.replaced_s, lambda: self._join(worker.pool))

    def _report_each_second(self, worker: SimulatedWorker) -> None:
        if worker.alive:
            self._report(worker)
            self.events.after(1.0, lambda: self._report_each_second(worker))

    def _report_soon(self, worker: SimulatedWorker) -> None:
        self.events.after(0.2, lambda: self._report(worker))

    def _report(self, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        report = worker.report()
        here, there = worker.pool.region.delay_s, self.fleet.agents_region

        def to_scheduler() -> None:
            self._core.pools.on_report(report, self.events.now_s)
            self._start_soon()

        def to_agents() -> None:
            for routes in self._routes:
                routes.on_report(report, self.events.now_s)

        self.events.after(HOP_S + here, to_scheduler)
        self.events.after(HOP_S + here + self._read_s(there), to_agents)

    def _read_s(self, region: Region) -> float:
        """From Kafka to a reader: the way, and the wait for the reader's next fetch."""
        return region.delay_s + 2 * region.delay_s * self._chance.random()

    # Starts

    def _start_soon(self) -> None:
        """Starts what may start, once for everything that happens at one moment."""
        if self._checks_at_s != self.events.now_s:
            self._checks_at_s = self.events.now_s
            self.events.after(0.0, self._start)

    def _start(self) -> None:
        self._checks_at_s = None
        while True:
            more = self.fleet.tasks is None or self._submitted < self.fleet.tasks
            while more and self._core.queued < QUEUED:
                self._core.on_task(self._submitted, self._task(self._submitted))
                self._submitted += 1
                more = self.fleet.tasks is None or self._submitted < self.fleet.tasks
            starts = self.measured.timed("start", self._next_starts)
            if not starts:
                break
            for start in starts:
                if self._batches is not None:
                    self._batches.on_start(start, self.events.now_s)
                self._begin(start)
        if self._core.queued and (wait_s := self._core.wait_s(self.events.now_s)) > 0:
            self.events.after(wait_s, self._start_soon)

    def _next_starts(self) -> list[EpisodeStarted]:
        now_s = self.events.now_s
        chosen = self._core.choose(now_s)
        if chosen is None:
            return []
        return self._core.starts(chosen, self._task(chosen.number), now_s)

    def _task(self, number: int) -> TaskSubmitted:
        return TaskSubmitted(
            source="scale", task_id=str(number), item_id=str(number), agent="default",
            roles={"policy": Use(policy=POLICY, sampling=Sampling(max_tokens=1))},
            max_turns=self._work.most_turns, max_tokens=1, samples=self._work.samples,
            deadline_s=int(self.fleet.deadline_s),
        )  # fmt: skip

    def _begin(self, start: EpisodeStarted) -> None:
        self._started.setdefault(start.task, start)
        self.measured.started(self.events.now_s)
        minimum = start.versions.get(POLICY, 0)
        episode = SimulatedEpisode(start.task, start.sample, self.events.now_s, minimum)
        self.events.after(
            HOP_S + self._read_s(self.fleet.agents_region), lambda: self._try(episode)
        )

    def _try(self, episode: SimulatedEpisode) -> None:
        """Begins an attempt: its environment starts."""
        work, losses = self._work, self.fleet.losses
        turns = round(self._lognormal(work.turns, work.turns_sigma))
        episode.turns = min(work.most_turns, max(1, turns))
        episode.turn, episode.context, episode.generated = 0, work.shared, 0
        episode.home = episode.oldest = episode.request = None
        if losses.environments_per_h:
            left_s = self._chance.expovariate(losses.environments_per_h / 3600)
            episode.lost_at_s = self.events.now_s + left_s
        ready_s = self._lognormal(work.start_s, work.start_sigma) if work.start_s else 0.0
        self.events.after(ready_s + self._action_s(), lambda: self._ask(episode))

    def _action_s(self) -> float:
        """The hops of an action and its observation: agents and environments are neighbours, but
        speak through Kafka."""
        region = self.fleet.agents_region
        return 2 * (HOP_S + region.delay_s) + self._read_s(region) + self._read_s(region)

    # Turns

    def _ask(self, episode: SimulatedEpisode) -> None:
        now_s = self.events.now_s
        if now_s >= episode.began_s + self.fleet.deadline_s:
            self._end(episode, "deadline")
            return
        if now_s >= episode.lost_at_s:
            self._retry(episode)
            return
        routes = self._routes[episode.task % self.fleet.agents]
        route = routes.route(self._request(episode), episode.home, now_s)
        partition = self.measured.timed("route", route.__enter__)
        if partition is None:
            partition = (episode.task * 2654435761 >> 7) % self.fleet.partitions
        tokens = round(self._lognormal(self._work.generated, self._work.generated_sigma))
        tokens = min(self._work.most_generated, max(20, tokens))
        prompt = SimulatedPrompt(episode, tokens, partition, route, now_s)
        self.measured.sent(prompt, self._topic.owner(partition), now_s, self._workers)
        away = self.fleet.agents_region.delay_s
        self.measured.moved(away, FIELDS + 4 * episode.context)
        self.events.after(HOP_S + away, lambda: self._written(prompt))

    def _request(self, episode: SimulatedEpisode) -> GenerationRequested:
        """What the routes see of a prompt. It is the same for all turns of an attempt."""
        if episode.request is None:
            episode.request = GenerationRequested(
                task=episode.task, sample=episode.sample, attempt=episode.attempt, call="0",
                policy=POLICY, sampling=Sampling(max_tokens=1), expires_at=0, digest=bytes(16),
            )  # fmt: skip
        return episode.request

    def _written(self, prompt: SimulatedPrompt) -> None:
        """A prompt is in the log."""
        region = self._topic.region(prompt.partition)
        self.measured.moved(region.delay_s, FIELDS + 4 * prompt.episode.context)
        self.events.after(self._read_s(region), lambda: self._topic.deliver(prompt))

    def _on_generated(self, worker: SimulatedWorker, prompt: SimulatedPrompt) -> None:
        there, here = worker.pool.region, self.fleet.agents_region
        for region in (there, here):
            self.measured.moved(region.delay_s, FIELDS + 12 * prompt.tokens)
        delay_s = HOP_S + there.delay_s + self._read_s(here)
        self.events.after(delay_s, lambda: self._answered(worker, prompt))

    def _answered(self, worker: SimulatedWorker, prompt: SimulatedPrompt) -> None:
        prompt.route.__exit__(None, None, None)
        now_s, episode = self.events.now_s, prompt.episode
        self.measured.answered(prompt, now_s)
        episode.home = worker.name
        episode.oldest = prompt.version if episode.oldest is None else episode.oldest
        episode.oldest = min(episode.oldest, prompt.version)
        episode.turn += 1
        episode.generated += prompt.tokens
        episode.context += prompt.tokens + self._work.observed
        if episode.turn >= episode.turns or episode.context > self._work.most_context:
            self._end(episode, "finished")
            return
        step_s = self._lognormal(self._work.step_s, self._work.step_sigma)
        self.events.after(step_s + self._action_s(), lambda: self._ask(episode))

    def _retry(self, episode: SimulatedEpisode) -> None:
        """An environment is gone: the attempt ends, and there is another one, up to a limit."""
        self.measured.lost_environments += 1
        self.measured.lost_turns += episode.turn
        episode.attempt += 1
        if episode.attempt < self.fleet.attempts:
            self._try(episode)
        else:
            self._end(episode, "failed")

    def _lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(sigma * self._chance.gauss(0.0, 1.0))

    # Ends

    def _end(self, episode: SimulatedEpisode, ending: str) -> None:
        delay_s = HOP_S + self.fleet.agents_region.delay_s
        self.events.after(delay_s, lambda: self._ended(episode, ending))

    def _ended(self, episode: SimulatedEpisode, ending: str) -> None:
        now_s = self.events.now_s
        self.measured.ended(episode, ending, now_s)
        self._core.on_outcome(episode.task, episode.sample)
        outcomes = self._outcomes.setdefault(episode.task, [])
        outcomes.append(self._outcome(episode, ending))
        if len(outcomes) == self._work.samples:
            # The agent has read its outcomes back before it writes the result.
            delay_s = self._read_s(self.fleet.agents_region) + self.fleet.agents_region.delay_s
            self.events.after(HOP_S + delay_s, lambda: self._close(episode.task))
        self._start_soon()

    def _outcome(self, episode: SimulatedEpisode, ending: str) -> EpisodeEnded:
        use = PolicyUse(
            policy=POLICY, tokens=episode.generated, longest=episode.context,
            oldest_version=episode.oldest if episode.oldest is not None else -1,
        )  # fmt: skip
        failed = ending == "failed" or episode.oldest is None
        return EpisodeEnded.model_validate(
            {
                "task": episode.task, "sample": episode.sample, "attempt": episode.attempt,
                "item_id": str(episode.task), "ending": "failed" if failed else ending,
                "trajectory": None if failed else Ref(
                    topic="t", partition=0, offset=0, digest=bytes(16)
                ),
                "reward": None if failed else self._chance.random(),
                "policies": () if failed else (use,), "attempts": episode.attempt + 1,
                "seconds": self.events.now_s - episode.began_s,
            }
        )  # fmt: skip

    def _close(self, task: int) -> None:
        outcomes = tuple(self._outcomes.pop(task))
        del self._started[task]
        self.measured.closed(self.events.now_s)
        ended = TaskEnded(
            task=task, source="scale", task_id=str(task), item_id=str(task), closed_by="all",
            outcomes=outcomes,
        )  # fmt: skip
        for group in self._groups.on_task(ended, int(self.events.now_s * 1000)):
            assert self._batches is not None
            oldest = min((one.oldest_version for one in group.samples), default=None)
            tokens = sum(one.tokens for one in group.samples)
            self._core.on_group(POLICY, task, oldest=oldest, tokens=tokens)
            self._batches.on_group(group, self._offset)
            self._offset += 1
        self._core.finished(task)
        self._assemble()

    # Batches and versions

    def _assemble(self) -> None:
        if self._batches is None:
            return
        now_s = self.events.now_s
        while (batch := self._batches.next_batch(now_s)) is not None:
            self._batches.on_batch(batch)
            self._core.on_batch(POLICY, batch.version, batch.frontier(), batch.samples)
            self.measured.batched(batch)
            for sample in batch.samples:
                self._core.finished(sample.task)
            self._trains.append(batch.version)
            self._train()
        due_s = self._batches.due_at(now_s)
        if due_s is not None and not now_s < self._assembles_s <= due_s:
            self._assembles_s = due_s
            self.events.at(due_s, self._assemble)
        self._start_soon()

    def _train(self) -> None:
        if self._trains and not self._training:
            assert self.fleet.training is not None
            self._training = True
            self.measured.trains(self.events.now_s)
            version = self._trains.pop(0)
            self.events.after(self.fleet.training.train_s, lambda: self._trained(version))

    def _trained(self, version: int) -> None:
        self._training = False
        self.measured.trained(self.events.now_s, version)
        self._publish(version)
        self._train()

    def _publish_first(self) -> None:
        self._publish(0)

    def _publish(self, version: int) -> None:
        self._published = version
        self._core.on_policy(POLICY, version)
        if version:
            self._weights.publish(version)
        if self._batches is not None:
            published = PolicyPublished(
                policy=POLICY, version=version, status="trained", digest=bytes(32),
                full_version=version,
            )  # fmt: skip
            self._batches.on_policy(published)
            self._assemble()
        self._start_soon()


Simulate = Callable[[Fleet], Measured]


def simulate(fleet: Fleet) -> Measured:
    """Runs a fleet and returns what was measured."""
    return DeploymentWorld(fleet).run()

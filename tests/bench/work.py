"""The two processes around the stream jobs: `produce` ends tasks, `load` loads batches.

Orders come as JSON lines on stdin, answers go as JSON lines to stdout; its end ends the process.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import cast

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    PolicyUse,
    Ref,
    Sampling,
    TaskEnded,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.operate.serve.process_setup import tune_garbage_collector
from tests.bench.trajectories import GROUP

TOKENS = 1024
VOCABULARY = 256
TASKS_IN_FLIGHT = 64


def a_turn(source: random.Random, tokens: int = TOKENS) -> Turn:
    """One prompt token, and sampled ones with their logprobs."""
    return Turn(
        call="2",
        policy="default",
        context=pack_i32([1]),
        tokens=pack_i32(source.randrange(VOCABULARY) for _ in range(tokens)),
        logprobs=pack_f32(-source.random() for _ in range(tokens)),
        versions=pack_spans([0] * tokens),
        finish="stop",
        text="",
    )


class Producer:
    """Ends tasks as an agent worker does: trajectory, then outcome, then result."""

    def __init__(self, log: EventLog, tokens: int = TOKENS) -> None:
        source = random.Random(0)
        self._log = log
        self._tokens = tokens
        self._turns = [a_turn(source, tokens) for _ in range(64)]
        self._sampling = Sampling(max_tokens=tokens)

    async def run(self, first_task: int, groups: int) -> dict[str, float]:
        """Ends so many tasks, a bounded number at once."""
        began, clock = time.time(), time.perf_counter()
        tasks = iter(range(first_task, first_task + groups))

        async def end_tasks() -> None:
            for task in tasks:
                await self._end_task(task)

        await asyncio.gather(*(end_tasks() for _ in range(TASKS_IN_FLIGHT)))
        return {"began": began, "seconds": time.perf_counter() - clock}

    async def _end_task(self, task: int) -> None:
        outcomes = await asyncio.gather(*(self._end_episode(task, n) for n in range(GROUP)))
        await self._log.send(
            TaskEnded(
                task=task,
                source="bench",
                task_id=str(task),
                item_id=str(task),
                closed_by="all",
                outcomes=tuple(outcomes),
            )
        )

    async def _end_episode(self, task: int, sample: int) -> EpisodeEnded:
        ref = await self._log.send(self._trajectory(task, sample))
        outcome = self._outcome(task, sample, ref)
        await self._log.send(outcome)
        return outcome

    def _trajectory(self, task: int, sample: int) -> TrajectoryRecorded:
        now = int(time.time() * 1000)
        return TrajectoryRecorded(
            task=task,
            sample=sample,
            source="bench",
            task_id=str(task),
            item_id=str(task),
            agent="default",
            samplings=(self._sampling,),
            turns=(self._turns[(task * GROUP + sample) % len(self._turns)],),
            reward=float(sample % 2),
            ending="finished",
            started=now,
            ended=now,
        )

    def _outcome(self, task: int, sample: int, ref: Ref) -> EpisodeEnded:
        tokens = self._tokens
        use = PolicyUse(policy="default", tokens=tokens, longest=tokens + 1, oldest_version=0)
        return EpisodeEnded(
            task=task,
            sample=sample,
            item_id=str(task),
            ending="finished",
            trajectory=ref,
            reward=float(sample % 2),
            policies=(use,),
        )


class Loader:
    """Loads batches as the trainer does: fetched, decoded, checked, packed."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._reader = follow_events(log, {Partition(log.topics.name(BATCHES, "default"), 0): 0})
        self._batches = self._read()

    async def run(self, batches: int) -> dict[str, float]:
        """Loads so many batches, from where it stands. `age_s` is from a batch's record on."""
        from headrace.trainer.loader import load_batch

        clock = time.perf_counter()
        ages_s = []
        for _ in range(batches):
            delivery = await anext(self._batches)
            prepared = await load_batch(self._log, delivery, VOCABULARY, 1)
            if prepared.unusable or not prepared.updates:
                raise RuntimeError(
                    f"batch {delivery.event.version}: {prepared.unusable or 'empty'}"
                )
            ages_s.append(time.time() - delivery.recorded_at)
        seconds = time.perf_counter() - clock
        return {"ended": time.time(), "seconds": seconds, "age_s": median(ages_s)}

    async def _read(self) -> AsyncIterator[Delivery[BatchAssembled]]:
        async for item in self._reader:
            if not isinstance(item, CaughtUp):
                yield cast(Delivery[BatchAssembled], item)

    async def aclose(self) -> None:
        """Closes what it reads from."""
        await self._reader.aclose()


async def work(kind: str, recipe: Recipe, cluster: ClusterConfig) -> None:
    """Obeys until stdin ends."""
    assert cluster.namespace is not None
    async with connect(cluster, f"bench-{kind}") as connection:
        topics = Topics(cluster.namespace, tuple(recipe.policies), recipe.partitions)
        log = await connection.writing_log(topics)
        worker = Producer(log) if kind == "produce" else Loader(log)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await worker.run(**json.loads(line))), flush=True)
        finally:
            if isinstance(worker, Loader):
                await worker.aclose()


if __name__ == "__main__":
    tune_garbage_collector()
    asyncio.run(work(sys.argv[1], read_recipe(sys.argv[2]), ClusterConfig.from_json(sys.argv[3])))

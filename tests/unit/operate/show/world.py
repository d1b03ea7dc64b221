"""A namespace in memory with made-up tasks that went all the way to a version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    BatchSample,
    Blob,
    Dropped,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    GroupSample,
    ObservationRecorded,
    PolicyPublished,
    Ref,
    Sampling,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    Use,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.schemas.topics import TASKS, Topics
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience
from tests.memory.memory_broker import MemoryCluster
from tests.memory.memory_registry import MemoryRegistry

BOUND_S = 120.0
SAMPLES = 2
DIGEST = bytes(16)
TOPICS = Topics("test", ("default",), 3)
LOST = Failure(origin="infrastructure", code="worker_lost", retryable=True)
AWAY: dict[str, Any] = {"expires_at": 9_999_999_999_000, "digest": DIGEST}


class World:
    """One namespace, and what was written to it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        codec = Codec()
        registry = MemoryRegistry()
        registry.prepare(codec, TOPICS)
        self.log = EventLog(self.cluster.client("test"), TOPICS, codec, registry, "writer-1")
        self.groups: dict[int, GroupClosed] = {}
        self.patience = Patience(lambda line: None)

    async def make_topics(self) -> None:
        """Makes all topics."""
        await self.log.broker.create_topics({one.name: (one.partitions, {}) for one in TOPICS})

    async def submit(self, task_id: str) -> int:
        """Submits a task of two samples; its number."""
        sampling = Sampling(max_tokens=1)
        ref = await self.log.send(
            TaskSubmitted(
                source="team", task_id=task_id, item_id="item", agent="default", samples=SAMPLES,
                roles={"policy": Use(policy="default", sampling=sampling)}, payload='{"n": 1}',
                environment=EnvironmentUse(use="default"),
                max_turns=3, max_tokens=9, deadline_s=60,
            )
        )  # fmt: skip
        return ref.offset

    async def run_task(self, task_id: str) -> int:
        """A task from its submission to its group. Sample 1 loses its first attempt."""
        number = await self.submit(task_id)
        submitted = (await self.log.fetch([await self.ref(number)]))[0]
        assert isinstance(submitted, TaskSubmitted)
        for sample in range(SAMPLES):
            await self.log.send(
                EpisodeStarted(
                    task=number, sample=sample, submitted=submitted, seed=sample, deadline=1
                )
            )
        await self.exchange(number, 1, 0, LOST)
        outcomes = [await self.episode(number, sample) for sample in range(SAMPLES)]
        common: dict[str, Any] = {"task": number, "item_id": "item"}
        await self.log.send(
            TaskEnded(
                source="team", task_id=task_id, closed_by="all", outcomes=tuple(outcomes), **common
            )
        )
        self.groups[number] = GroupClosed(
            policy="default", verdict="scored", estimator="grpo", mean=0.5, deviation=0.5,
            samples=tuple(_group_sample(outcome) for outcome in outcomes), **common,
        )  # fmt: skip
        await self.log.send(self.groups[number])
        return number

    async def ref(self, number: int) -> Ref:
        """The reference of a task's submission."""
        at = Position(Partition(TOPICS.name(TASKS), 0), number)
        (record,) = await self.log.broker.fetch([at])
        return (await self.log.decode(record)).ref

    async def exchange(
        self, number: int, sample: int, attempt: int, failure: Failure | None = None
    ) -> None:
        """A reset and a generation, with their answers; the last one fails where one is given."""
        key: dict[str, Any] = {"task": number, "sample": sample, "attempt": attempt}
        await self.log.send(
            ActionRequested(
                call="1", index=0, kind="reset", environment=EnvironmentUse(use="default"),
                **key, **AWAY,
            )
        )  # fmt: skip
        await self.log.send(
            ObservationRecorded(call="1", index=0, digest=DIGEST, text="where\nam I", **key)
        )
        await self.log.send(
            GenerationRequested(
                call="2", policy="default", text="where\nam I", sampling=Sampling(max_tokens=1),
                **key, **AWAY,
            )
        )  # fmt: skip
        await self.log.send(
            GenerationCompleted(
                call="2", digest=DIGEST, policy="default", worker="inference-1",
                finish="failed" if failure else "length", tokens=pack_i32([97]), text="a",
                versions=pack_spans([4]), failure=failure, **key,
            )
        )  # fmt: skip

    async def episode(self, number: int, sample: int) -> EpisodeEnded:
        """An episode that ends well, sample 1 in its second attempt; its outcome."""
        attempt = sample
        await self.exchange(number, sample, attempt)
        turn = Turn(
            call="2", policy="default", context=pack_i32([104, 105]), tokens=pack_i32([97]),
            logprobs=pack_f32([-1.0]), versions=pack_spans([4]), finish="length", text="a",
        )  # fmt: skip
        trajectory = await self.log.send(
            TrajectoryRecorded(
                task=number, sample=sample, attempt=attempt, source="team", task_id="x",
                item_id="item", agent="default", turns=(turn,), reward=float(sample),
                ending="finished", failures=(LOST,) * attempt, started=0, ended=1,
            )
        )  # fmt: skip
        outcome = EpisodeEnded(
            task=number, sample=sample, attempt=attempt, item_id="item", ending="finished",
            trajectory=trajectory, reward=float(sample), attempts=attempt + 1,
        )  # fmt: skip
        await self.log.send(outcome)
        return outcome

    async def batch(self, version: int, tasks: list[int], low_mark: int) -> Ref:
        """A batch of tasks; sample 0 of each is dropped as stale. In a transaction, as always."""
        samples = tuple(
            BatchSample(task=task, **{k: getattr(one, k) for k in _SHARED})
            for task in tasks
            for one in self.groups[task].samples
            if one.sample
        )
        batch = BatchAssembled(
            policy="default", version=version, recipe=bytes(32), seed=0, samples=samples,
            dropped=tuple(Dropped(task=task, sample=0, reason="stale") for task in tasks),
            sampled_tokens=len(samples), reward_mean=0.5, low_mark=low_mark, groups_read=low_mark,
        )  # fmt: skip
        return await self.as_sole_writer(batch)

    async def publish(self, version: int, batch: Ref | None = None, **changes: Any) -> Ref:
        """A version."""
        published = PolicyPublished(
            policy="default", version=version, status="trained" if version else "initial",
            batch=batch, digest=bytes([version % 256]) * 32, full_version=version,
            full=Blob(sha256=bytes([version % 256]) * 32, size=3), metrics={"loss": 0.5},
        )  # fmt: skip
        return await self.as_sole_writer(published.model_copy(update=changes))

    async def as_sole_writer(self, event: Event) -> Ref:
        """Writes as the fenced services do: a transaction's mark follows the record."""
        writer = await self.log.broker.fenced(type(event).__name__)
        return (await self.log.send_all(writer, [event]))[0]


_SHARED = ("sample", "trajectory", "advantages", "tokens", "longest", "oldest_version")


def _group_sample(outcome: EpisodeEnded) -> GroupSample:
    assert outcome.trajectory is not None
    return GroupSample(
        sample=outcome.sample, trajectory=outcome.trajectory, reward=outcome.reward or 0.0,
        advantages=pack_f32([2 * (outcome.reward or 0.0) - 1]), tokens=1, longest=3,
        oldest_version=4,
    )  # fmt: skip


def in_a_world(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Runs a test in a fresh namespace."""

    async def main() -> None:
        world = World()
        await world.make_topics()
        async with asyncio.timeout(BOUND_S):
            await test(world)

    asyncio.run(main())

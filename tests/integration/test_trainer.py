"""The trainer over a log in memory: versions in order, whole through restarts, bit by bit."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.errors import Fenced, HeadraceError, RecordsLost, UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    EVENTS,
    BatchAssembled,
    BatchSample,
    PolicyPublished,
    Ref,
    Sampling,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES, TRAJECTORIES, Topics
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.kafka.broker import Broker, Outgoing, Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import weights_digest
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer import service
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

BOUND_S = 120.0
"""No wait of these tests is longer."""
ACTIONS = list(b"LDRU")
ALLOWED = Sampling(max_tokens=1, allowed=pack_i32(ACTIONS))
RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "tasks": {"roles": {"policy": "learner"}},
        "policies": {
            "learner": {
                "model": "tiny-llama",
                "training": {
                    "learning_rate": 0.01,
                    "updates": 2,
                    "checkpoint_every": 2,
                    "device": "cpu",
                },
            },
            "fixed": {"model": "tiny-llama", "seed": 3, "training": False},
        },
    }
)


class Bench:
    """One namespace of a broker, with a state folder and a blob store."""

    def __init__(
        self, broker: Broker, folder: Path, namespace: str = "test", recipe: Recipe = RECIPE
    ) -> None:
        self.recipe = recipe
        codec = Codec()
        for schema_id, event_type in enumerate(EVENTS, 1):
            codec.register(event_type, schema_id)
        signers = {name: policy.signers for name, policy in recipe.policies.items()}
        topics = Topics(namespace, list(RECIPE.policies), 2, recipe.reads_from, signers=signers)
        self.log = EventLog(broker, topics, codec, MemoryRegistry(), "test")
        self.blobs = LocalBlobStore(folder / "blobs")
        self.state = folder / namespace

    async def make_topics(self) -> None:
        topics = self.log.topics
        await self.log.broker.create_topics({one.name: (one.partitions, {}) for one in topics})

    def context(self) -> ServiceContext:
        return ServiceContext(
            self.log, self.recipe, self.blobs, "test", self.state, asyncio.Event(), asyncio.Event()
        )

    def weights(self, published: PolicyPublished) -> Path:
        """A version's weights, as a reader that has nothing yet gets them."""
        return LocalWeights(self.blobs, self.state / "reader").fetch(published)

    async def expire(self, partition: Partition, before: int) -> None:
        """Deletes records, as retention does."""
        assert isinstance(self.log.broker, MemoryBroker)
        self.log.broker._state.log(partition).expire(before)

    async def submit(
        self,
        version: int,
        samples: int = 4,
        advantages: Sequence[float] | None = None,
        **changes: Any,
    ) -> BatchAssembled:
        """Writes a batch of made-up trajectories, the same ones for the same version."""
        random = Random(version)
        made = [await self.sample(version, number, random, **changes) for number in range(samples)]
        if advantages is not None:
            made = [
                one.model_copy(update={"advantages": pack_f32([value])})
                for one, value in zip(made, advantages, strict=True)
            ]
        batch = BatchAssembled(
            policy="learner",
            version=version,
            recipe=RECIPE.digest,
            seed=0,
            samples=tuple(made),
            sampled_tokens=3 * samples,
            reward_mean=0.5,
            low_mark=version,
            groups_read=version,
        )
        await self.log.send(batch)
        return batch

    async def sample(
        self, version: int, number: int, random: Random, **changes: Any
    ) -> BatchSample:
        turns = [
            Turn(
                parent=index - 1,
                call=str(index),
                policy="learner",
                context=pack_i32([random.randint(97, 112)]),
                tokens=pack_i32([random.choice(ACTIONS)]),
                logprobs=pack_f32([-1.386]),
                versions=pack_spans([version - 1]),
            ).model_copy(update=changes)
            for index in range(3)
        ]
        trajectory = TrajectoryRecorded(
            task=version,
            sample=number,
            source="test",
            task_id=str(version),
            item_id="item",
            agent="default",
            samplings=(ALLOWED,),
            turns=tuple(turns),
            ending="finished",
            started=0,
            ended=1,
        )
        return BatchSample(
            task=version,
            sample=number,
            trajectory=await self.log.send(trajectory),
            advantages=pack_f32([random.uniform(-1, 1)]),
            tokens=3,
            longest=6,
            oldest_version=version - 1,
        )

    async def published(self, policy: str = "learner", until: int = -1) -> list[PolicyPublished]:
        """All publications of a policy, once version `until` is among them."""
        policies = Partition(self.log.topics.name(POLICIES), 0)
        reader = follow_events(self.log, {policies: 0})
        found: list[PolicyPublished] = []
        caught_up = False
        async with asyncio.timeout(BOUND_S):
            async for item in reader:
                if isinstance(item, CaughtUp):
                    caught_up = True
                elif isinstance(item.event, PolicyPublished) and item.event.policy == policy:
                    found.append(item.event)
                if caught_up and (until < 0 or any(one.version == until for one in found)):
                    break
        await reader.aclose()
        return found

    @asynccontextmanager
    async def training(self, *, killed: bool = False) -> AsyncIterator[asyncio.Task[None]]:
        """A trainer; in the end stopped cleanly, or killed without a last checkpoint."""
        context = self.context()
        trainer = asyncio.ensure_future(service.run(context, "learner"))
        try:
            yield trainer
        finally:
            if killed:
                trainer.cancel()
            context.stopping.set()
            await asyncio.wait({trainer}, timeout=BOUND_S)
        if not killed and not trainer.cancelled() and (error := trainer.exception()):
            raise error

    async def train(self, until: int, *, killed: bool = False) -> list[PolicyPublished]:
        """Trains until a version is published."""
        async with self.training(killed=killed):
            return await self.published(until=until)


def on_memory(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]], folder: Path, recipe: Recipe = RECIPE
) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        bench = Bench(broker, folder, recipe=recipe)
        await bench.make_topics()
        await scenario(bench)
        await broker.close()

    asyncio.run(main())


def facts(published: Sequence[PolicyPublished]) -> list[tuple[int, str, int]]:
    return [(one.version, one.status, one.updates) for one in published]


def straight(folder: Path, versions: int) -> list[bytes]:
    """The digests of as many versions trained by one process, on a log of its own."""
    digests: list[bytes] = []

    async def scenario(bench: Bench) -> None:
        for version in range(1, versions + 1):
            await bench.submit(version)
        digests.extend(one.digest for one in await bench.train(versions))

    on_memory(scenario, folder)
    return digests


def test_each_batch_becomes_a_version_whose_weights_are_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        async with bench.training():
            await bench.published(until=1)
            await bench.submit(2)
            published = await bench.published(until=2)

        assert facts(published) == [(0, "initial", 0), (1, "trained", 2), (2, "trained", 2)]
        assert len({one.digest for one in published}) == 3
        for one in published:
            assert weights_digest(bench.weights(one)) == one.digest
            assert one.tokenizer is not None
            assert bench.blobs.get(one.tokenizer).read_bytes()[:1] == b"{"
            assert (one.context, one.dtype, one.base) == (512, "float32", "tiny-llama")
        assert published[0].batch is None
        assert published[2].batch is not None
        [recorded] = await bench.log.fetch([published[2].batch])
        assert isinstance(recorded, BatchAssembled)
        assert recorded.version == 2
        metrics = published[2].metrics
        assert metrics["tokens"] == 12
        assert metrics["reward_mean"] == 0.5
        assert metrics["staleness_max"] == 0
        assert metrics["grad_norm"] > 0

    on_memory(scenario, tmp_path)


def test_three_and_a_restart_and_three_are_six(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight", 6)

    async def scenario(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)
        await bench.train(3)
        for version in range(4, 7):
            await bench.submit(version)
        published = await bench.train(6)

        assert [one.digest for one in published] == expected
        assert [one.status for one in published] == ["initial"] + ["trained"] * 6

    on_memory(scenario, tmp_path / "restarted")


@pytest.mark.parametrize("checkpoints", ["newest", "older", "none"])
def test_a_killed_trainer_is_followed_without_a_trace(tmp_path: Path, checkpoints: str) -> None:
    """It retrains silently from the checkpoint that is left, and publishes nothing twice."""
    expected = straight(tmp_path / "straight", 6)

    async def scenario(bench: Bench) -> None:
        for version in range(1, 6):
            await bench.submit(version)
        await bench.train(5, killed=True)
        folders = sorted((bench.state / "checkpoints" / "learner").iterdir())
        assert [folder.name for folder in folders] == ["v000000000002", "v000000000004"]
        if checkpoints == "older":
            (folders[1] / "state.safetensors").write_bytes(b"torn")
        if checkpoints == "none":
            shutil.rmtree(bench.state)
        await bench.submit(6)

        assert [one.digest for one in await bench.train(6)] == expected

    on_memory(scenario, tmp_path / "killed")


def test_weights_that_come_out_otherwise_are_published_again(tmp_path: Path) -> None:
    """Another machine's arithmetic: the log has another digest of version 2 than training gives."""
    expected = straight(tmp_path / "straight", 3)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        first = await bench.train(1, killed=True)
        await bench.log.send(first[1].model_copy(update={"version": 2, "digest": bytes(32)}))
        await bench.submit(2)
        await bench.submit(3)
        published = await bench.train(3)

        assert facts(published)[-2:] == [(2, "resumed", 0), (3, "trained", 2)]
        assert [one.digest for one in published[-2:]] == expected[2:]

    on_memory(scenario, tmp_path / "other")


def test_a_checkpoint_of_another_log_is_not_gone_on_from(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight", 2)

    async def scenario(bench: Bench) -> None:
        shutil.copytree(tmp_path / "straight" / "test", bench.state)
        await bench.submit(1, samples=2)
        published = await bench.train(1)
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2)]
        assert published[1].digest not in expected

    on_memory(scenario, tmp_path / "other")


def test_what_cant_be_trained_on_keeps_the_weights(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1, samples=0)
        await bench.submit(2, versions=pack_i32([5, 5]))
        await bench.submit(3, logprobs=pack_f32([-1.0, -1.0]))
        await bench.submit(4)
        published = await bench.train(4)

        assert facts(published) == [
            (0, "initial", 0),
            (1, "trained", 0),
            (2, "skipped", 0),
            (3, "skipped", 0),
            (4, "trained", 2),
        ]
        assert len({(one.digest, one.full) for one in published[:4]}) == 1
        assert facts(await bench.train(4)) == facts(published)

    on_memory(scenario, tmp_path)


def test_one_malformed_sample_costs_only_itself(tmp_path: Path) -> None:
    """It is dropped again when the version is trained again."""

    async def scenario(bench: Bench) -> None:
        changes = [{}, {}, {"logprobs": pack_f32([-1.0, -1.0])}, {}]
        samples = [
            await bench.sample(1, number, Random(number), **change)
            for number, change in enumerate(changes)
        ]
        await bench.log.send(
            BatchAssembled(
                policy="learner", version=1, recipe=RECIPE.digest, seed=0, samples=tuple(samples),
                sampled_tokens=12, low_mark=1, groups_read=1,
            )
        )  # fmt: skip
        published = await bench.train(1, killed=True)
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2)]
        assert published[1].metrics["dropped_samples"] == 1
        assert published[1].metrics["tokens"] == 9
        assert facts(await bench.train(1)) == facts(published)

    on_memory(scenario, tmp_path)


def test_training_stops_if_batch_after_batch_is_skipped(tmp_path: Path) -> None:
    """A restarted trainer does not count what its predecessor skipped."""

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        for version in range(2, 12):
            await bench.submit(version, logprobs=pack_f32([-1.0, -1.0]))
        for newest in (6, 11):
            with pytest.raises(UsageError, match=r"last 5 batches .* 2 logprobs for 1 tokens"):
                async with asyncio.timeout(BOUND_S):
                    await service.run(bench.context(), "learner")
            published = await bench.published(until=newest)
            assert facts(published)[-1] == (newest, "skipped", 0)

    on_memory(scenario, tmp_path)


def test_a_batch_written_twice_is_trained_once_and_a_gap_is_an_error(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.submit(1, samples=2)
        await bench.submit(2)
        assert [one[0] for one in facts(await bench.train(2))] == [0, 1, 2]
        await bench.submit(4)
        with pytest.raises(HeadraceError, match="has batch 4, but batch 3 is due"):
            async with asyncio.timeout(BOUND_S):
                await service.run(bench.context(), "learner")

    on_memory(scenario, tmp_path)


async def forget_trajectories(bench: Bench) -> None:
    """Deletes every trajectory, as retention does."""
    partitions = [Partition(bench.log.topics.name(TRAJECTORIES), number) for number in range(2)]
    for partition, (_, end) in (await bench.log.broker.ends(partitions)).items():
        await bench.expire(partition, end)


async def a_new_batch_without_trajectories(bench: Bench) -> None:
    await bench.submit(1)
    await forget_trajectories(bench)
    await bench.submit(2)
    published = await bench.train(2)
    assert facts(published) == [(0, "initial", 0), (1, "skipped", 0), (2, "trained", 2)]
    assert published[1].digest == published[0].digest
    # What was skipped is skipped again, whether its trajectories are there or not.
    shutil.rmtree(bench.state / "checkpoints")
    await bench.submit(3)
    again = await bench.train(3)
    assert facts(again)[3:] == [(3, "trained", 2)]


def test_a_new_batch_whose_trajectories_are_gone_is_skipped(tmp_path: Path) -> None:
    on_memory(a_new_batch_without_trajectories, tmp_path)


def test_a_batch_that_names_no_trajectory_is_skipped(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        topics = bench.log.topics
        partition = Partition(topics.name(TRAJECTORIES), 0)
        at = await bench.log.broker.send(Outgoing(partition.topic, b"k", b"garbage", partition=0))
        never_written, garbage = at.offset + 50, at.offset
        for version, offset in enumerate((never_written, garbage), 1):
            digest = hashlib.sha256(b"garbage").digest()[:16]
            sample = await bench.sample(version, 0, Random(version))
            named = Ref(topic=partition.topic, partition=0, offset=offset, digest=digest)
            sample = sample.model_copy(update={"trajectory": named})
            await bench.log.send(
                BatchAssembled(
                    policy="learner", version=version, recipe=RECIPE.digest, seed=0,
                    samples=(sample,), sampled_tokens=3, low_mark=version, groups_read=version,
                )
            )  # fmt: skip
        await bench.submit(3)
        published = await bench.train(3)
        assert [one.status for one in published] == ["initial", "skipped", "skipped", "trained"]

    on_memory(scenario, tmp_path)


def test_a_published_version_that_cant_be_trained_again_ends_the_trainer(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for version in (1, 2):
            await bench.submit(version)
        await bench.train(2)
        shutil.rmtree(bench.state / "checkpoints")
        await forget_trajectories(bench)
        with pytest.raises(RecordsLost, match="version 1 can't be trained again"):
            async with asyncio.timeout(BOUND_S):
                await service.run(bench.context(), "learner")

    on_memory(scenario, tmp_path)


def test_a_trainer_whose_publications_are_gone_does_not_begin_again(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.train(1)
        policies = Partition(bench.log.topics.name(POLICIES), 0)
        await bench.expire(policies, (await bench.log.broker.ends([policies]))[policies][1])
        with pytest.raises(RecordsLost, match="no version of policy learner"):
            await service.run(bench.context(), "learner")

    on_memory(scenario, tmp_path)


def test_a_new_trainer_fences_the_other(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight", 2)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        old = asyncio.ensure_future(service.run(bench.context(), "learner"))
        await bench.published(until=1)
        bench.state = tmp_path / "elsewhere"
        async with bench.training():
            await bench.submit(2)
            published = await bench.published(until=2)
            with pytest.raises(Fenced):
                async with asyncio.timeout(BOUND_S):
                    await old
        assert [one.digest for one in published] == expected

    on_memory(scenario, tmp_path / "two")


def test_a_policy_that_is_not_trained_has_one_version(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            context = bench.context()
            running = asyncio.ensure_future(service.run(context, "fixed"))
            await bench.published("fixed", until=0)
            context.stopping.set()
            await asyncio.wait_for(running, BOUND_S)
        published = await bench.published("fixed")
        assert facts(published) == [(0, "initial", 0)]
        assert weights_digest(bench.weights(published[0])) == published[0].digest

    on_memory(scenario, tmp_path)


def test_it_must_be_given_one_of_several_policies(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for name in (None, "unknown"):
            with pytest.raises(UsageError, match="name one of learner, fixed"):
                await service.run(bench.context(), name)

    on_memory(scenario, tmp_path)

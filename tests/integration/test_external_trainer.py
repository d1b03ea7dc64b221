"""Another trainer's steps over a log in memory: what it publishes, repeats and skips."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import Fenced, UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.weights import weights_digest
from headrace.services.operate.run.children import child_specs
from headrace.trainer import service
from headrace.trainer.checkpoint import Checkpoint
from headrace.trainer.contract.external_trainer import ExternalTrainer, trained_elsewhere
from headrace.trainer.contract.packed_plan import plan
from headrace.trainer.contract.training_batch import TrainingBatch
from headrace.trainer.contract.weight_files import pack_weights
from headrace.trainer.publish import sole_publisher
from tests.integration.test_trainer import RECIPE as OURS
from tests.integration.test_trainer import Bench, on_memory


def external(**keys: Any) -> Recipe:
    tree = OURS.model_dump(mode="json")
    tree["policies"]["learner"]["training"] = {"external": True, **keys}
    return Recipe.model_validate(tree)


RECIPE = external(max_skipped=3)


@dataclass
class MomentumTrainer:
    """Another team's trainer in small: momentum, and weights that only its updates give."""

    steps: ExternalTrainer
    saved: list[tuple[Checkpoint, float, float]] = field(default_factory=list)
    """Its checkpoints, each with weight and momentum."""
    weight: float = 0.0
    momentum: float = 0.0
    seen: list[int] = field(default_factory=list)
    stopping: asyncio.Task[bool] = field(
        default_factory=lambda: asyncio.create_task(asyncio.Event().wait())
    )

    def packed(self) -> bytes:
        return pack_weights({"w": np.full(64, self.weight, np.float32)})

    async def start(self) -> None:
        chosen = self.steps.resume([one for one, _, _ in self.saved])
        for checkpoint, weight, momentum in self.saved:
            if checkpoint == chosen:
                self.weight, self.momentum = weight, momentum
        await self.publish(self.steps.version)

    async def publish(self, version: int, save: bool = False) -> None:
        checkpoint = await self.steps.publish(version, self.packed(), {"loss": 0.5}, 1)
        if save:
            self.saved.append((checkpoint, self.weight, self.momentum))

    async def next(self) -> TrainingBatch:
        async with asyncio.timeout(20):
            batch = await self.steps.next(self.stopping)
        assert batch is not None
        self.seen.append(batch.version)
        return batch

    def update(self, batch: TrainingBatch) -> None:
        [[micro]] = plan(batch, 1, 10_000)
        self.momentum = 0.9 * self.momentum + float(micro.advantages.sum())
        self.weight += self.momentum

    async def train(self, until: int, save: Iterable[int] = ()) -> None:
        while self.steps.version < until:
            batch = await self.next()
            self.update(batch)
            await self.publish(batch.version, batch.version in save)


@asynccontextmanager
async def another_trainer(
    bench: Bench, before: MomentumTrainer | None = None
) -> AsyncIterator[MomentumTrainer]:
    async with sole_publisher(bench.context(), "learner") as publisher:
        steps = ExternalTrainer(bench.log, bench.recipe, publisher)
        trainer = MomentumTrainer(steps, [] if before is None else before.saved)
        try:
            yield trainer
        finally:
            trainer.stopping.cancel()
            await steps.aclose()


def facts(published: Sequence[PolicyPublished]) -> list[tuple[int, str]]:
    return [(one.version, one.status) for one in published]


async def submit(bench: Bench, versions: Iterable[int]) -> None:
    for version in versions:
        await bench.submit(version)


async def straight(bench: Bench, folder: Path, until: int) -> list[bytes]:
    """The digests of an uninterrupted run, on a log of its own."""
    other = Bench(bench.log.broker, folder, "straight", recipe=bench.recipe)
    await other.make_topics()
    await submit(other, range(1, until + 1))
    async with another_trainer(other) as trainer:
        await trainer.start()
        await trainer.train(until)
    return [one.digest for one in await other.published(until=until)]


def test_each_batch_becomes_a_version(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await submit(bench, (1, 2))
        async with another_trainer(bench) as trainer:
            await trainer.start()
            await trainer.train(2)
        published = await bench.published(until=2)

        assert facts(published) == [(0, "initial"), (1, "trained"), (2, "trained")]
        for one in published:
            assert weights_digest(bench.weights(one)) == one.digest
        assert published[2].metrics["loss"] == 0.5
        assert published[2].metrics["reward_mean"] == 0.5
        assert published[2].updates == 1
        assert published[2].batch is not None

    on_memory(scenario, tmp_path, RECIPE)


@pytest.mark.parametrize("save", [(), (2,), (2, 4)])
def test_a_killed_trainer_goes_on_without_a_trace(tmp_path: Path, save: tuple[int, ...]) -> None:
    async def scenario(bench: Bench) -> None:
        expected = await straight(bench, tmp_path / "other", 6)
        await submit(bench, range(1, 7))
        async with another_trainer(bench) as killed:
            await killed.start()
            await killed.train(4, save)
        async with another_trainer(bench, killed) as trainer:
            await trainer.start()
            first = await trainer.next()
            assert first.version == max(save, default=0) + 1
            assert first.published == (first.version <= 4)
            trainer.update(first)
            await trainer.publish(first.version)
            await trainer.train(6)
        published = await bench.published(until=6)

        assert [one.digest for one in published] == expected
        assert facts(published)[1:] == [(number, "trained") for number in range(1, 7)]

    on_memory(scenario, tmp_path, RECIPE)


def test_lost_momentum_is_published_as_resumed(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await submit(bench, range(1, 5))
        async with another_trainer(bench) as killed:
            await killed.start()
            await killed.train(3, save=(2,))
        killed.saved = [(one, weight, 0.0) for one, weight, _ in killed.saved]
        async with another_trainer(bench, killed) as trainer:
            await trainer.start()
            await trainer.train(4)
        published = await bench.published(until=4)

        assert facts(published)[3:] == [(3, "trained"), (3, "resumed"), (4, "trained")]
        assert published[3].digest != published[4].digest

    on_memory(scenario, tmp_path, RECIPE)


def test_a_batch_is_skipped_by_the_trainer_and_stays_skipped(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.submit(2, advantages=[math.inf] * 4)
        await bench.submit(3)
        async with another_trainer(bench) as trainer:
            await trainer.start()
            await trainer.train(1, save=(1,))
            poison = await trainer.next()
            checkpoint = await trainer.steps.skip(poison.version, "the loss is not finite")
            assert checkpoint.version == 2
        async with another_trainer(bench, trainer) as following:
            await following.start()
            await following.train(3)
            assert following.seen == [3]
        published = await bench.published(until=3)

        assert facts(published)[2:] == [(2, "skipped"), (3, "trained")]
        assert published[1].digest == published[2].digest != published[3].digest

    on_memory(scenario, tmp_path, RECIPE)


def test_what_cant_be_used_is_skipped_without_the_trainer(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1, logprobs=b"")  # not one of its tokens has a logprob
        await bench.submit(2, samples=0)
        await bench.submit(3)
        async with another_trainer(bench) as trainer:
            await trainer.start()
            batch = await trainer.next()
            assert batch.version == 3
            # A skipped version is written while the next batch is made ready.
            published = await bench.published(until=2)

        assert facts(published) == [(0, "initial"), (1, "skipped"), (2, "trained")]
        assert published[2].updates == 0
        assert len({one.digest for one in published}) == 1

    on_memory(scenario, tmp_path, RECIPE)


def test_too_many_skipped_batches_stop_the_trainer(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for version in range(1, 5):
            await bench.submit(version, logprobs=b"")
        async with another_trainer(bench) as trainer:
            await trainer.start()
            with pytest.raises(UsageError, match="the last 3 batches were skipped"):
                await trainer.next()
        assert facts(await bench.published(until=3))[-1] == (3, "skipped")

    on_memory(scenario, tmp_path, RECIPE)


def test_only_the_version_that_is_due_can_be_published(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await submit(bench, (1, 2))
        async with another_trainer(bench) as trainer:
            with pytest.raises(UsageError, match="first publish version 0"):
                await trainer.next()
            with pytest.raises(UsageError, match="version 1 can't be published now"):
                await trainer.publish(1)
            await trainer.start()
            with pytest.raises(UsageError, match="no batch is open"):
                await trainer.publish(1)
            with pytest.raises(UsageError, match="before the first `publish`"):
                trainer.steps.resume([])
            await trainer.next()
            with pytest.raises(UsageError, match="batch 1 is open"):
                await trainer.next()
            with pytest.raises(UsageError, match="batch 1 is open"):
                await trainer.publish(2)
            with pytest.raises(UsageError, match="version 2 can't be skipped now"):
                await trainer.steps.skip(2, "no")
            await trainer.publish(1)
        assert facts(await bench.published(until=1)) == [(0, "initial"), (1, "trained")]

    on_memory(scenario, tmp_path, RECIPE)


def test_a_restarted_trainer_gives_the_tensors_that_are_published(tmp_path: Path) -> None:
    """Workers could not load others over those that they have."""

    async def scenario(bench: Bench) -> None:
        await submit(bench, range(1, 3))
        async with another_trainer(bench) as trainer:
            await trainer.start()
            await trainer.train(2)
        for other in (
            {"v": np.zeros(64, np.float32)},
            {"w": np.zeros(65, np.float32)},
            {"w": np.zeros(64, np.int32)},
        ):
            async with another_trainer(bench, trainer) as restarted:
                with pytest.raises(UsageError, match="other tensors than the version before"):
                    await restarted.steps.publish(0, pack_weights(other), {}, 1)
        for blob in (tmp_path / "blobs").rglob("*"):
            if blob.is_file() and len(blob.name) == 62:
                blob.unlink()
        async with another_trainer(bench, trainer) as restarted:
            await restarted.start()  # The store has nothing to compare with, and is repaired.
            await restarted.train(2)

    on_memory(scenario, tmp_path, RECIPE)


def test_a_successor_ends_what_a_trainer_publishes(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await submit(bench, (1,))
        async with another_trainer(bench) as zombie:
            await zombie.start()
            await zombie.next()
            async with another_trainer(bench) as trainer:
                await trainer.start()
                with pytest.raises(Fenced):
                    await zombie.publish(1)
                await trainer.train(1)
        assert facts(await bench.published(until=1)) == [(0, "initial"), (1, "trained")]

    on_memory(scenario, tmp_path, RECIPE)


def test_our_own_trainer_leaves_such_a_policy_alone(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(UsageError, match="another trainer trains this policy"):
            await service.run(bench.context(), "learner")
        assert await bench.published() == []

    on_memory(scenario, tmp_path, RECIPE)


def test_a_policy_must_be_left_to_another_trainer() -> None:
    assert trained_elsewhere(RECIPE, None) == trained_elsewhere(RECIPE, "learner") == "learner"
    for recipe, policy in ((OURS, "learner"), (OURS, None), (RECIPE, "fixed")):
        with pytest.raises(UsageError, match=r"training\.external = true"):
            trained_elsewhere(recipe, policy)


def test_keys_that_only_our_trainer_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="`learning_rate`, `epochs`: only Headrace's own trainer"):
        external(learning_rate=0.1, epochs=2)
    assert external(full_every=1, teacher_s=5.0) is not None


def test_a_run_starts_no_trainer_for_such_a_policy() -> None:
    names = [spec.name for spec in child_specs(RECIPE, Path("recipe.json"))]
    assert "trainer-fixed" in names
    assert "trainer-learner" not in names
    assert "assemble-batches-learner" in names

"""The trainer after what breaks its batches, its weights and its store: the run goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import BlobError
from headrace.schemas.events import Blob, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.inference import weights_follower
from headrace.services.inference.engine import EngineSetup
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.inference.weights_follower import WeightsFollower
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import follow_events
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import model_folder, weights_digest
from headrace.trainer import service as trainer_service
from headrace.trainer.contract import training_session
from headrace.trainer.learner import Learner
from headrace.trainer.losses.grpo_loss import GrpoLoss
from headrace.trainer.losses.loss import MicroBatch
from headrace.trainer.versions import SAFETENSORS
from tests.integration.test_trainer import BOUND_S, RECIPE, Bench, facts, on_memory, straight

BROKEN_STORE = ["lost", "cut", "changed"]


def blob_file(bench: Bench, blob: Blob | None) -> Path:
    assert blob is not None
    return bench.blobs.get(blob)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "lost":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def with_loss(name: str) -> Recipe:
    """The test's recipe with a loss of this module."""
    tree = RECIPE.model_dump(mode="json")
    tree["policies"]["learner"]["training"]["loss"] = f"{__name__}:{name}"
    return Recipe.model_validate(tree)


def with_full_every(versions: int) -> Recipe:
    """The test's recipe with whole weights so often."""
    tree = RECIPE.model_dump(mode="json")
    tree["policies"]["learner"]["training"]["full_every"] = versions
    return Recipe.model_validate(tree)


def hungry_loss(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """GRPO, but for batches whose first advantage is negative: these want all memory there is."""
    loss = GrpoLoss().terms(batch, logprobs)
    return loss * torch.empty(2**60).sum() if batch.advantages[0] < 0 else loss


async def until_whole(bench: Bench, published: PolicyPublished) -> None:
    """Waits until a version's weights are in the store again."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                digest = weights_digest(bench.weights(published))
            except BlobError:
                await asyncio.sleep(0.01)
            else:
                assert digest == published.digest
                return


async def until_served(policy: ServedPolicy, version: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while policy.version != version:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_batch_of_nan_is_skipped_and_the_next_one_trained(tmp_path: Path, poison: float) -> None:
    """The advantages are no numbers, so the loss is none. It stays skipped after a restart."""

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.submit(2, advantages=[0.5, poison, 0.5, 0.5])
        await bench.submit(3)
        published = await bench.train(3, killed=True)

        assert [(one.version, one.status) for one in published[1:]] == [
            (1, "trained"),
            (2, "skipped"),
            (3, "trained"),
        ]
        assert published[2].digest == published[1].digest != published[3].digest
        assert facts(await bench.train(3)) == facts(published)

    on_memory(scenario, tmp_path)


def test_a_batch_that_takes_all_memory_is_skipped(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1, advantages=[1.0] * 4)
        await bench.submit(2, advantages=[-1.0] * 4)
        await bench.submit(3, advantages=[1.0] * 4)
        published = await bench.train(3)

        assert [one.status for one in published] == ["initial", "trained", "skipped", "trained"]
        assert published[2].digest == published[1].digest

    on_memory(scenario, tmp_path, with_loss("hungry_loss"))


@pytest.mark.parametrize("how", BROKEN_STORE)
def test_a_restarted_trainer_mends_the_store(tmp_path: Path, how: str) -> None:
    """Weights that were published and are gone: workers refuse them until they are back."""

    async def scenario(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)
        published = await bench.train(3, killed=True)
        damage(blob_file(bench, published[-1].full), how)
        with pytest.raises(BlobError, match=r"is not in|damaged"):
            blob_file(bench, published[-1].full)

        async with bench.training():
            await until_whole(bench, published[-1])
        assert facts(await bench.published()) == facts(published), "the same weights, once"

    on_memory(scenario, tmp_path, with_full_every(1))


@pytest.mark.parametrize("blob", ["full", "delta"])
@pytest.mark.parametrize("how", BROKEN_STORE)
def test_a_restarted_trainer_replaces_a_broken_chain(tmp_path: Path, how: str, blob: str) -> None:
    """A version by deltas that can't be had any more is published again, with whole weights."""

    async def scenario(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)
        published = await bench.train(3, killed=True)
        newest = published[-1]
        assert [(one.from_version, one.to_version) for one in newest.deltas][-1] == (2, 3)
        damage(blob_file(bench, newest.full if blob == "full" else newest.deltas[-1].blob), how)
        with pytest.raises(BlobError):
            bench.weights(newest)
        await bench.submit(4)
        *_, again, after = await bench.train(4)

        assert (again.version, again.status, again.digest) == (3, "resumed", newest.digest)
        assert (again.full_version, again.deltas) == (3, ())
        assert (after.version, after.full_version, len(after.deltas)) == (4, 3, 1)
        for one in (again, after):
            assert weights_digest(bench.weights(one)) == one.digest

    on_memory(scenario, tmp_path)


def test_training_goes_on_while_a_version_is_stored(tmp_path: Path) -> None:
    """The store is slow: version 2 is trained meanwhile, and comes out after version 1."""
    stored, trained = threading.Event(), threading.Event()
    waited: list[bool] = []

    class Slow(LocalBlobStore):
        def put(self, data: bytes | Path, media: str = "") -> Blob:
            if media == SAFETENSORS and not stored.is_set():
                waited.append(trained.wait(BOUND_S))
                stored.set()
            return super().put(data, media)

    async def scenario(bench: Bench) -> None:
        bench.blobs = Slow(tmp_path / "slow")
        train = Learner.train

        def noted(self: Learner, *arguments: Any) -> dict[str, float]:
            metrics = train(self, *arguments)
            trained.set()
            return metrics

        await bench.submit(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "train", noted)
            published = await bench.train(1)
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2)]
        assert waited == [True], "version 1 was trained before version 0 was stored"
        assert published[1].metrics["publish_wait_s"] >= 0

    on_memory(scenario, tmp_path)


@pytest.mark.parametrize("full_every", [1, 20])
def test_an_idle_trainer_mends_the_store_and_the_worker_serves_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    full_every: int,
) -> None:
    """Nobody restarts anything: the worker refuses, the trainer notices, the worker loads it."""
    monkeypatch.setattr(training_session, "CHECK_S", 0.2)
    monkeypatch.setattr(weights_follower, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(weights_follower, "LAST_RETRY_S", 0.05)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        async with bench.training():
            published = await bench.published(until=1)
            damage(blob_file(bench, published[1].full), "changed")
            folder = model_folder("tiny-llama")
            engine = ScriptedEngine(EngineSetup(folder, 4))
            served = ServedPolicy("learner", engine, Slots(engine), Tokenizer(folder), "worker")
            reader = follow_events(bench.log, {Partition(bench.log.topics.name(POLICIES), 0): 0})
            follower = WeightsFollower(
                reader, bench.blobs, {"learner": served}, tmp_path / "scratch"
            )
            following = asyncio.ensure_future(follower.run())
            try:
                await until_served(served, 1)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        assert "version 1 can't be served" in caplog.text
        assert "the newest weights are stored again" in caplog.text

    on_memory(scenario, tmp_path, with_full_every(full_every))


def test_a_version_that_changes_nothing_mends_the_store(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        async with bench.training():
            published = await bench.published(until=1)
            damage(blob_file(bench, published[1].full), "lost")
            await bench.submit(2, samples=0)
            published = await bench.published(until=2)
        assert published[2].digest == published[1].digest
        assert weights_digest(bench.weights(published[2])) == published[2].digest

    on_memory(scenario, tmp_path)


@pytest.mark.parametrize("how", BROKEN_STORE)
def test_the_store_of_a_policy_that_is_not_trained_is_mended(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_service, "CHECK_S", 0.1)

    async def scenario(bench: Bench) -> None:
        for broken in ("never", "while it runs", "while it was away"):
            context = bench.context()
            running = asyncio.ensure_future(trainer_service.run(context, "fixed"))
            [newest] = await bench.published("fixed", until=0)
            await until_whole(bench, newest)
            if broken == "while it runs":
                damage(blob_file(bench, newest.full), how)
                await until_whole(bench, newest)
            context.stopping.set()
            await asyncio.wait_for(running, BOUND_S)
            damage(blob_file(bench, newest.full), how)
        assert facts(await bench.published("fixed")) == [(0, "initial", 0)]

    on_memory(scenario, tmp_path)


def test_a_newest_version_whose_digest_is_wrong_is_published_again(tmp_path: Path) -> None:
    """The log names weights under another's digest: no worker takes them, the trainer corrects."""
    expected = straight(tmp_path / "straight", 2)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        first = await bench.train(1, killed=True)
        wrong: PolicyPublished = first[1].model_copy(update={"digest": bytes(32)})
        await bench.log.send(wrong)
        await bench.submit(2)
        published = await bench.train(2)

        assert [(one.version, one.status) for one in published[2:]] == [
            (1, "trained"),
            (1, "resumed"),
            (2, "trained"),
        ]
        assert [one.digest for one in published[3:]] == expected[1:]
        for one in published[3:]:
            assert weights_digest(bench.weights(one)) == one.digest

    on_memory(scenario, tmp_path / "wrong")


def test_a_store_that_takes_nothing_ends_the_trainer_and_the_next_goes_on(tmp_path: Path) -> None:
    """A full disk is a dependency out of reach: nothing is published that is not stored."""

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.train(1)
        good = bench.blobs
        (tmp_path / "file").write_text("no folder")
        bench.blobs = LocalBlobStore(tmp_path / "file")
        await bench.submit(2)
        with pytest.raises(Exception, match="can't write a blob"):
            async with asyncio.timeout(BOUND_S):
                await trainer_service.run(bench.context(), "learner")
        bench.blobs = good
        assert [one.version for one in await bench.train(2)] == [0, 1, 2]

    on_memory(scenario, tmp_path)

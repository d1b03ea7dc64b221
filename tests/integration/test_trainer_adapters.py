"""The trainer of an adapter over a log in memory: the base is stored once, and stays the same."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.errors import BlobError, UsageError
from headrace.schemas.events import Adapter, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.inference.engine import EnginePrompt, EngineSetup
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.models.weights import model_folder, weights_digest
from headrace.trainer import service
from headrace.trainer.contract import training_session
from tests.integration.test_trainer import BOUND_S, RECIPE, Bench, facts, on_memory
from tests.integration.test_trainer_recovery import damage

LAYERS = 14
"""Linear layers of tiny-llama, but for its head."""


def with_adapters(**learner: Any) -> Recipe:
    """The recipe of the trainer's tests, its policies adapters of one base."""
    tree = RECIPE.model_dump(mode="json")
    for policy in tree["policies"].values():
        policy |= {"seed": 3, "lora": {"rank": 4, "alpha": 8.0}}
    tree["policies"]["learner"] |= learner
    return Recipe.model_validate(tree)


def adapters(published: Sequence[PolicyPublished]) -> list[Adapter]:
    found = [one.adapter for one in published]
    assert None not in found
    return [one for one in found if one is not None]


def test_versions_are_adapters_of_one_base_that_is_stored_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        context = bench.context()
        untrained = asyncio.ensure_future(service.run(context, "fixed"))
        [fixed] = await bench.published("fixed", until=0)
        context.stopping.set()
        await untrained
        for version in range(1, 4):
            await bench.submit(version)
        published = await bench.train(3)

        assert len({one.digest for one in published}) == 4
        of = adapters([fixed, *published])
        assert {(one.base, one.base_digest) for one in of} == {(of[0].base, of[0].base_digest)}
        assert (of[0].rank, of[0].alpha, len(of[0].targets)) == (4, 8.0, LAYERS)
        base = bench.blobs.get(of[0].base)
        assert weights_digest(base) == of[0].base_digest
        assert base.stat().st_size > 3 * bench.weights(published[3]).stat().st_size
        assert len(load_file(bench.weights(published[3]))) == 2 * LAYERS
        assert published[3].full is not None

        engine = TorchEngine(EngineSetup(model_folder("tiny-llama"), 2, device="cpu"))
        answers = []
        for one in (fixed, published[3], fixed):
            await engine.load(LocalWeights(bench.blobs, bench.state / one.policy).weights(one))
            prompt = EnginePrompt(one.policy, [97, 98], 8, temperature=0.0)
            answers.append(await engine.generate(prompt))
        assert [answer.versions for answer in answers] == [[0] * 8, [3] * 8, [0] * 8]
        assert answers[0].logprobs != answers[1].logprobs
        assert answers[0].logprobs == answers[2].logprobs, "the other adapter changed the base"
        assert weights_digest(bench.weights(fixed)) == fixed.digest
        await engine.close(0)

    on_memory(scenario, tmp_path, with_adapters())


@pytest.mark.parametrize("checkpoints", ["newest", "none"])
def test_a_killed_trainer_of_an_adapter_is_followed_bit_by_bit(
    tmp_path: Path, checkpoints: str
) -> None:
    expected: list[bytes] = []

    async def straight(bench: Bench) -> None:
        for version in range(1, 6):
            await bench.submit(version)
        expected.extend(one.digest for one in await bench.train(5))

    async def killed(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)
        await bench.train(3, killed=True)
        if checkpoints == "none":
            shutil.rmtree(bench.state)
        for version in range(4, 6):
            await bench.submit(version)
        assert [one.digest for one in await bench.train(5)] == expected

    on_memory(straight, tmp_path / "straight", with_adapters())
    on_memory(killed, tmp_path / "killed", with_adapters())


def test_the_store_loses_the_base_and_the_trainer_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_session, "CHECK_S", 0.1)

    async def until_back(bench: Bench, published: PolicyPublished) -> None:
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    bench.blobs.verify(adapters([published])[0].base)
                    return
                except BlobError:
                    await asyncio.sleep(0.01)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        published = await bench.train(1)
        base = adapters(published)[0].base
        damage(bench.blobs.get(base), "lost")
        async with bench.training():
            await until_back(bench, published[1])
            damage(bench.blobs.get(base), "changed")
            await until_back(bench, published[1])
        assert facts(await bench.published()) == facts(published)

    on_memory(scenario, tmp_path, with_adapters())


def test_a_run_whose_base_was_exchanged_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tiny-llama"), folder)

    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        [first, _] = await bench.train(1)
        base = bench.blobs.get(adapters([first])[0].base)
        shutil.copy(base, folder / "model.safetensors")
        await bench.train(1)

        tensors = load_file(base)
        tensors["lm_head.weight"][0] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"version 1 is not an adapter of the weights"):
            async with bench.training() as trainer:
                await asyncio.wait({trainer}, timeout=BOUND_S)

    on_memory(scenario, tmp_path, with_adapters(model=str(folder)))


def test_a_base_that_is_not_the_published_one_is_not_served(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        [published] = await bench.train(0)
        [adapter] = adapters([published])
        other = adapter.model_copy(update={"base_digest": bytes(32)})
        wrong = published.model_copy(update={"adapter": other})
        local = LocalWeights(bench.blobs, bench.state / "reader")
        with pytest.raises(BlobError, match=r"version 0 of policy 'learner' is an adapter of 0000"):
            local.weights(wrong)
        good = local.weights(published)
        assert good.adapter is not None
        assert good.adapter.base == bench.blobs.get(adapter.base)
        # It is not read again with every version; where it is gone, it is got again.
        again = local.weights(published)
        assert dataclasses.asdict(again) == dataclasses.asdict(good)
        good.adapter.base.unlink()
        with pytest.raises(BlobError, match="is not in"):
            local.weights(published)

    on_memory(scenario, tmp_path, with_adapters())

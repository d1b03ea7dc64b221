"""The trainer's logprobs, from a real trainer to the dashboard's strip of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from headrace.schemas.events import BatchAssembled, BatchSample, TrajectoryRecorded
from headrace.schemas.packed import pack_f32, unpack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.weights import model_folder
from headrace.services.operate.dashboard.dashboard_api import DashboardApi
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.trainer.model_loading import load_model
from tests.browser.recorded_episode import tokens
from tests.integration.test_trainer import ACTIONS, BOUND_S, RECIPE, Bench, facts, on_memory

DROPPED, PRUNED, OFF, NO_BATCH, SKIPPED = (
    "dropped this episode from batch 2",
    "It was pruned",
    "record_logprobs was off",
    "No batch has trained on this episode",
    "skipped batch 3",
)


def with_training(**changes: Any) -> Recipe:
    tree = RECIPE.model_dump(mode="json")
    tree["policies"]["learner"]["training"] |= changes
    return Recipe.model_validate(tree)


@asynccontextmanager
async def dashboard(bench: Bench) -> AsyncIterator[DashboardApi]:
    """The dashboard's API, after it has read the log."""
    follower = IndexFollower(bench.log, bench.recipe)
    following = asyncio.create_task(follower.follow())
    await asyncio.wait_for(follower.caught_up.wait(), BOUND_S)
    api = DashboardApi(
        cast(Any, None), cast(Any, None), follower, FactReader(bench.log), bench.blobs
    )
    try:
        yield api
    finally:
        api.close()
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def expected(bench: Bench, weights: Path, sample: BatchSample) -> list[float]:
    """The logprobs of a sample's sampled tokens: by one plain forward with these weights."""
    model = load_model(model_folder("tiny-llama"), 0).eval()
    model.load_state_dict(load_file(weights), strict=False)
    [trajectory] = await bench.log.fetch([sample.trajectory])
    assert isinstance(trajectory, TrajectoryRecorded)
    ids = [one for turn in trajectory.turns for one in unpack_i32(turn.context + turn.tokens)]
    scores = model(torch.tensor([ids])).logits[0].detach()
    allowed = torch.full_like(scores, -torch.inf)
    allowed[:, ACTIONS] = scores[:, ACTIONS]
    logprobs = allowed.log_softmax(-1)
    return [float(logprobs[at - 1, ids[at]]) for at in range(1, len(ids), 2)]


@pytest.mark.parametrize("changes", [{"minibatches": 1}, {"minibatches": 2, "epochs": 2}])
def test_the_strip_shows_what_the_weights_before_the_batch_say(
    changes: dict[str, int], tmp_path: Path
) -> None:
    """Also a restart changes nothing, and each thing that is unknown has its reason."""

    async def scenario(bench: Bench) -> None:
        batches = [await bench.submit(1), await spoiled(bench)]
        await bench.sample(9, 0, Random(9))
        published = await bench.train(2, killed=True)
        again = await bench.train(2)
        assert facts(again) == facts(published)
        assert [one.logprobs for one in again] == [one.logprobs for one in published]
        assert published[0].logprobs is None
        async with dashboard(bench) as api:
            for batch, (before, after) in zip(batches, pairwise(published), strict=True):
                assert after.logprobs is not None
                assert after.logprobs.size == 4 * batch.sampled_tokens
                weights = bench.weights(before)
                for sample in batch.samples:
                    tree = await api.tokens({}, sample.task, sample.sample)
                    if (batch.version, sample.sample) == (2, 2):
                        assert_unknown(tree, DROPPED)
                        continue
                    assert tree["remarks"] == []
                    # The tests in the browser use the same columns.
                    assert tree.keys() == tokens(17, 0, {}).keys()
                    assert tree["trainer"][::2] == [None] * 3  # context
                    numbers = await expected(bench, weights, sample)
                    assert tree["trainer"][1::2] == pytest.approx(numbers, abs=1e-5)
            assert_unknown(await api.tokens({}, 9, 0), NO_BATCH)
            assert published[1].logprobs is not None
            bench.blobs.get(published[1].logprobs).unlink()
            assert_unknown(await api.tokens({}, 1, 0), PRUNED)

    on_memory(scenario, tmp_path, with_training(**changes))


async def spoiled(bench: Bench) -> BatchAssembled:
    """Batch 2, of which the trainer drops sample 2."""
    samples = [
        await bench.sample(2, number, Random(number), **change)
        for number, change in enumerate([{}, {}, {"logprobs": pack_f32([-1.0, -1.0])}, {}])
    ]
    batch = BatchAssembled(
        policy="learner", version=2, recipe=RECIPE.digest, seed=0, samples=tuple(samples),
        sampled_tokens=12, low_mark=2, groups_read=2,
    )  # fmt: skip
    await bench.log.send(batch)
    return batch


def assert_unknown(tree: dict[str, Any], why: str) -> None:
    assert set(tree["trainer"]) == {None}
    [remark] = tree["remarks"]
    assert why in remark


def test_it_can_be_turned_off_and_a_skipped_batch_has_none(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.submit(1)
        await bench.submit(2)
        await bench.submit(3, logprobs=b"")
        published = await bench.train(3)
        assert [one.status for one in published] == ["initial", "trained", "trained", "skipped"]
        assert [one.logprobs for one in published] == [None] * 4
        async with dashboard(bench) as api:
            assert_unknown(await api.tokens({}, 1, 0), OFF)
            assert_unknown(await api.tokens({}, 3, 0), SKIPPED)

    on_memory(scenario, tmp_path, with_training(record_logprobs=False))

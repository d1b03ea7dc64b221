"""Batches from recorded results: by the recorded order, each time the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import BatchAssembled, EpisodeEnded, PolicyUse
from headrace.schemas.topics import BATCHES
from headrace.services.operate.replay import replay_trajectories as trajectories
from headrace.services.operate.replay.recording import (
    change_recorded,
    make_fresh,
    read_results,
    read_topic,
    reading_recorded,
)
from headrace.services.operate.replay.replay_trajectories import (
    CHANGEABLE,
    assemble,
    check_tokenizers,
)
from tests.unit.operate.replay.test_gone import RECIPE, TOPICS, Bench
from tests.unit.stream_jobs.test_batches import a_recipe
from tests.unit.stream_jobs.test_groups import a_task, an_outcome

TASKS = (3, 0, 1, 2, 6, 5, 4)
"""In the order in which they ended. Task n was drawn by version n // 2."""


def outcomes(task: int, *rewards: float) -> list[EpisodeEnded]:
    use = PolicyUse(policy="default", tokens=5, longest=9, oldest_version=task // 2)
    return [
        an_outcome(sample, reward, task=task, policies=(use,))
        for sample, reward in enumerate(rewards)
    ]


def on_recording(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        await bench.broker.create_topics(
            {"t.trajectories.v1": (2, {})}
        )  # where the outcomes' trajectories lie
        for task in TASKS:
            await bench.log.send(a_task(outcomes(task, 1.0, 0.0 if task != 5 else 1.0), task=task))
        await test(bench)
        await bench.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def assemble_all(
    bench: Bench, decided_at: dict[int, int], *settings: str
) -> tuple[list[BatchAssembled], trajectories.Assembled]:
    recipe = change_recorded(RECIPE, None, settings, CHANGEABLE)
    recipe = reading_recorded(bench.recording, recipe)
    assert recipe.reads_from == ("old", "t")
    log = await make_fresh(bench.recording, None, recipe)
    results = await read_results(bench.recording.log)
    order = sorted(results.locations, key=lambda task: results.locations[task])
    made = await assemble(
        bench.recording, log, recipe, results, order, {"default": decided_at}, {"default": ()}
    )
    found: list[Any] = []
    while len(found) < len(made["default"].sizes):  # a transaction is seen a moment later
        found = [one.event async for one in read_topic(log, BATCHES)]
    return found, made["default"]


def tasks_of(batches: list[BatchAssembled]) -> list[list[int]]:
    return [list(dict.fromkeys(sample.task for sample in batch.samples)) for batch in batches]


def as_recorded(lag: int) -> dict[int, int]:
    """Each task was so many versions behind when it was decided."""
    return {task: task // 2 + lag for task in TASKS}


FIFO = 'policies.default.batches.order="fifo"'


def test_batches_follow_the_record_and_the_last_one_may_be_short() -> None:
    async def test(bench: Bench) -> None:
        batches, made = await assemble_all(bench, as_recorded(1), FIFO)
        assert tasks_of(batches) == [[3, 0], [1, 2], [6, 5], [4]]
        assert (made.groups, made.scored, made.sizes) == (7, 7, [4, 4, 4, 2])
        assert [batch.version for batch in batches] == [1, 2, 3, 4]
        assert batches[-1].low_mark == 7

    on_recording(test)


def test_the_same_recipe_gives_the_same_batches_however_results_are_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(bench: Bench) -> None:
        first, _ = await assemble_all(bench, as_recorded(1))
        monkeypatch.setattr(trajectories, "chunks", lambda items: ([one] for one in items))
        again, _ = await assemble_all(bench, as_recorded(1))
        assert again == first

    on_recording(test)


def test_staleness_is_that_of_the_record_whatever_the_new_pace() -> None:
    """One group a batch: the replay comes to version 7, where the record had come to 4."""

    async def test(bench: Bench) -> None:
        one_each = "policies.default.batches.groups=1"
        batches, made = await assemble_all(bench, as_recorded(1), one_each, FIFO)
        assert tasks_of(batches) == [[task] for task in TASKS]
        assert not made.dropped
        batches, made = await assemble_all(bench, as_recorded(2), one_each, FIFO)
        assert made.dropped == {"stale": 7}
        assert made.sizes == [0]
        batches, made = await assemble_all(
            bench, as_recorded(2), one_each, "policies.default.batches.max_staleness=2"
        )
        assert sum(made.sizes) == 14

    on_recording(test)


def test_other_estimators_and_filters_are_applied() -> None:
    async def test(bench: Bench) -> None:
        batches, made = await assemble_all(
            bench,
            as_recorded(0),
            "policies.default.groups.advantage=rloo",
            'policies.default.groups.filters=["zero_advantage"]',
            FIFO,
        )
        assert tasks_of(batches) == [[3, 0], [1, 2], [6, 4]]
        assert made.dropped == {"zero_advantage": 1}
        plain, _ = await assemble_all(bench, as_recorded(0), FIFO)
        ours = {(one.task, one.sample): one for batch in batches for one in batch.samples}
        for theirs in (one for batch in plain for one in batch.samples):
            if theirs.task != 5:
                mine = ours[theirs.task, theirs.sample]
                assert mine.trajectory == theirs.trajectory
                assert mine.advantages != theirs.advantages

    on_recording(test)


def test_a_model_of_other_tokens_is_refused() -> None:
    def with_model(model: str) -> Any:
        policy = a_recipe().policies["default"].model_copy(update={"model": model})
        return a_recipe().model_copy(update={"policies": {"default": policy}})

    check_tokenizers(with_model("tiny-llama"), with_model("tiny-llama"))
    with pytest.raises(UsageError, match="no-such-model"):
        check_tokenizers(with_model("tiny-llama"), with_model("no-such-model"))

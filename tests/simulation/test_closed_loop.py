"""Scheduler, episodes of any length, batches and trainer in a loop: full batches, no deadlock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.stream_jobs import batches, live_groups, waiting_groups
from tests.bench import closed_loop
from tests.bench.closed_loop import POLICY, Loop, changed
from tests.bench.loop_world import World

SEEDS = 40
MANY_SEEDS = 1_000


def a_recipe(chance: Random) -> Recipe:
    samples, groups = chance.randint(1, 8), chance.randint(1, 6)
    return parse_recipe(
        {
            "name": "loop",
            "tasks": {"use": "count", "samples": samples},
            "scheduler": {"live_episodes": samples * chance.randint(1, 4 * groups)},
            "policies": {
                POLICY: {
                    "model": "tiny-llama",
                    "batches": {
                        "groups": groups,
                        "max_staleness": chance.choice((0, 1, 2, 4, 8, 16)),
                        "prefetch": chance.randint(0, 2),
                        "straggler_wait_s": chance.choice((None, 0.0, 10.0)),
                    },
                }
            },
        },
        "test",
    )


def a_world(chance: Random, seed: int) -> World:
    return World(
        median_s=chance.choice((1.0, 20.0, 300.0)),
        sigma=chance.uniform(0.1, 1.5),
        kept=chance.choice((1.0, 0.6, 0.2, 0.0)),
        train_s=chance.choice((0.1, 10.0, 1_000.0)),
        deaths=chance.choice((0.0, 0.05, 0.5)),
        hung=chance.choice((0.0, 0.0, 0.01, 0.2)),
        load_s=chance.choice((0.0, 5.0, 100.0)),
        waits=chance.random() < 0.8,
        long=chance.choice((0.0, 0.0, 0.05, 0.3)),
        tasks=80,
        seed=seed,
    )


def check(*seeds: int) -> None:
    """Every task is decided, soon, and a batch is short only when the tasks run out."""
    for seed in seeds:
        _check(seed)


def _check(seed: int) -> None:
    chance = Random(seed)
    recipe, world = a_recipe(chance), a_world(chance, seed)
    result = Loop(recipe, world).run()
    assert (result.undecided, result.parts) == (0, 0), (seed, recipe, world)
    groups = recipe.policies[POLICY].batches.groups
    assert set(result.batches) <= {groups}, (seed, recipe, world)
    # The last batches may wait for the trainer, with what `prefetch` allows, and one for more.
    settings = recipe.policies[POLICY].batches
    longest_s = settings.batch_wait_s + (2 + settings.max_staleness) * world.train_s
    assert result.decided_s - result.closed_s <= longest_s, (seed, recipe, world)


def test_batches_are_full_and_every_task_is_decided() -> None:
    check(*range(SEEDS))


MUTANTS = {
    "a batch is short while groups are live": (
        batches,
        "if live or now_s < self._changed_s",
        "if now_s < self._changed_s",
    ),
    "closed groups stay live": (
        batches,
        "        self._live.close(group.task, group.seconds if group.mean is not None else 0.0)\n",
        "",
    ),
    "groups are short of stale samples": (
        waiting_groups,
        "fresh = tuple(sample for sample in group.samples if sample.oldest_version < 0)",
        "fresh = tuple(s for s in group.samples if self.slack(s.oldest_version, newest) >= 0)",
    ),
}
"""Rules of the loop: the module, a text of its code and what replaces it without the rule."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_loop_without_a_rule_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new = MUTANTS[name]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    mutant: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), mutant)
    for user, name in ((closed_loop, "BatchAssembler"), (batches, "WaitingGroups")):
        monkeypatch.setattr(user, name, mutant.get(name, getattr(user, name)))
    with pytest.raises(AssertionError, match="Recipe"):
        check(*range(SEEDS))


@pytest.mark.long
def test_batches_are_full_and_every_task_is_decided_in_many_worlds() -> None:
    check(*range(MANY_SEEDS))


def a_loop(live: int | None = None, mode: str = "async", **batches: Any) -> Recipe:
    """Batches of 8 groups with 8 samples."""
    batches = {"groups": 8, **batches}
    return parse_recipe(
        {
            "name": "loop",
            "mode": mode,
            "tasks": {"use": "count", "samples": 8, "max_tokens": 1200},
            "scheduler": {} if live is None else {"live_episodes": live},
            "policies": {POLICY: {"model": "tiny-llama", "batches": batches}},
        },
        "test",
    )


@pytest.mark.parametrize("median_s", [5.0, 300.0])
@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_batches_with_replays_are_full_and_have_the_share(median_s: float, kept: float) -> None:
    recipe = a_loop(live=128, replay={"share": 0.3, "max_uses": 2, "max_age": 16})
    world = World(
        median_s, 0.6, train_s=median_s / 10, deaths=0.02, kept=kept, tasks=int(320 / kept)
    )
    result = Loop(recipe, world).run()
    assert (result.full(8), result.undecided, result.parts) == (1.0, 0, 0)
    # The first batches have nothing to replay.
    first = next(index for index, count in enumerate(result.replayed) if count)
    assert first <= 2
    share = sum(result.replayed[first:]) / sum(result.batches[first:])
    assert share == pytest.approx(0.3, abs=0.01)
    assert max(result.uses.values()) == 2
    assert max(result.ages) <= 16
    assert result.stale_share <= 0.01
    assert 0.97 <= result.length_ratio <= 1.03, "long episodes are trained on as often"


def test_no_group_of_a_bound_of_0_is_started_in_vain_for_a_batch_with_replays() -> None:
    """The scheduler starts as many groups as the batch needs, also while the pool fills."""
    recipe = a_loop(live=64, max_staleness=0, prefetch=0, replay={"share": 0.45})
    result = Loop(recipe, World(120.0, 0.6, train_s=12.0, tasks=200)).run()
    assert (result.full(8), result.stale, result.undecided) == (1.0, 0, 0)
    assert set(result.replayed[1:]) <= {3, 4}


def test_batches_by_tokens_are_full_within_the_bound_of_staleness() -> None:
    recipe = a_loop(live=64, groups=64, tokens=8_000, max_staleness=8)
    result = Loop(recipe, World(120.0, 0.9, train_s=12.0, deaths=0.02, tasks=400)).run()
    assert result.undecided == 0
    assert all(8_000 <= tokens < 12_000 for tokens in result.tokens)
    assert result.stale_share <= 0.02
    assert len(set(result.batches)) > 1, "the number of groups follows from their lengths"


@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_a_synchronous_loop_waits_for_nothing_but_its_batch(kept: float) -> None:
    recipe = a_loop(mode="sync")
    world = World(120.0, 0.6, train_s=12.0, deaths=0.02, kept=kept, tasks=int(120 / kept))
    result = Loop(recipe, world).run()
    assert (result.full(8), result.stale, result.undecided) == (1.0, 0, 0)
    assert set(result.staleness) == {0}
    for moment, published in result.made[:-1]:
        assert moment in result.closes, "a batch is made when its last group is closed"
        assert published == result.made.index((moment, published)), "and of the newest version"


def test_hung_episodes_cost_their_samples_and_not_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = a_loop(live=64, max_staleness=8)
    for sigma in (0.3, 0.6):
        world = World(120.0, sigma, train_s=12.0, deaths=0.02, hung=0.002, tasks=320, seed=1)
        result, impatient = closed_loop.compare(recipe, world)
        assert result.full(8) == 1.0
        assert result.stale_share <= 0.05
        assert result.length_ratio >= 0.97
        assert result.rate >= 0.9 * impatient.rate
        with monkeypatch.context() as mutant:
            mutant.setattr(live_groups, "LATE", 1e9)
            assert Loop(recipe, world).run().rate < 0.8 * impatient.rate, "no group is late"


def test_tasks_that_take_ten_times_as_long_are_trained_at_the_same_rate() -> None:
    for sigma in (0.3, 0.6):
        world = World(120.0, sigma, train_s=12.0, deaths=0.02, long=0.05, tasks=480)
        result, impatient = closed_loop.compare(a_loop(live=64), world)
        assert result.stale_long_share <= 0.02
        assert result.length_ratio >= 0.97
        assert result.rate >= 0.98 * impatient.rate
        assert result.mean_staleness <= 2.0
        tight = Loop(a_loop(live=64, max_staleness=8), world).run()
        assert tight.stale_long_share > 0.2, "a smaller limit loses them"


def test_late_engines_make_nothing_stale_if_they_wait_for_the_version_of_a_start() -> None:
    recipe = a_loop(live=128, max_staleness=2)
    world = World(120.0, 0.6, train_s=12.0, deaths=0.02, load_s=24.0, tasks=320)
    result = Loop(recipe, world).run()
    assert result.stale_share <= 0.05
    assert result.length_ratio >= 0.97
    hasty = Loop(recipe, replace(world, waits=False)).run()
    assert hasty.stale_share > 0.2
    assert hasty.length_ratio < 0.97
    assert result.rate > 0.9 * hasty.rate


def test_long_episodes_are_trained_as_often_as_short_ones() -> None:
    """With 8 versions of slack and one batch in flight; without the wait they are not."""
    tree = {
        "name": "loop",
        "tasks": {"use": "count", "samples": 8},
        "scheduler": {"live_episodes": 32},
        "policies": {POLICY: {"model": "tiny-llama", "batches": {"groups": 4}}},
    }
    recipe = parse_recipe(tree, "test")
    world = World(median_s=120.0, sigma=0.9, train_s=12.0, deaths=0.02, tasks=400)
    good = Loop(changed(recipe, max_staleness=8), world).run()
    assert good.full(4) == 1.0
    assert good.stale_share <= 0.01
    assert 0.97 <= good.length_ratio <= 1.03
    impatient = Loop(changed(recipe, max_staleness=1, straggler_wait_s=0), world).run()
    assert impatient.stale_share > 0.05
    assert impatient.length_ratio < 0.97


def test_the_staleness_does_not_grow_with_its_limit_if_the_trainer_is_slow() -> None:
    recipe = parse_recipe(
        {
            "name": "loop",
            "tasks": {"use": "count", "samples": 8},
            "scheduler": {"live_episodes": 32},
            "policies": {POLICY: {"model": "tiny-llama", "batches": {"groups": 4}}},
        },
        "test",
    )
    world = World(median_s=120.0, sigma=0.6, train_s=600.0, tasks=400)
    results = [Loop(changed(recipe, max_staleness=limit), world).run() for limit in (4, 16)]
    assert all(result.mean_staleness < 4.0 for result in results)
    assert results[1].rate > 0.98 * results[0].rate

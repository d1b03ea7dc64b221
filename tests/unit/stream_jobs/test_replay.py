"""Which groups a batch trains on again: how many, which, and the same after any crash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.schemas import replay_pool
from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.replay.rebuilder import Rebuilder, decided_by
from headrace.services.operate.verify.invariants.replay_checks import Replays
from headrace.stream_jobs import batches as batch_assembly
from headrace.stream_jobs.batches import BatchAssembler
from tests.unit.stream_jobs.test_batches import ENDED_S, a_group, a_publication, tasks_of


def a_recipe(**batches: Any) -> Recipe:
    batches = {"groups": 4, "prefetch": 0, "max_staleness": 4, **batches}
    policy = {"model": "tiny", "batches": batches}
    return Recipe.model_validate({"name": "a-run", "policies": {"default": policy}})


class Run:
    """Makes batches one after the other. There are always enough fresh groups."""

    def __init__(self, recipe: Recipe, skipped: frozenset[int] = frozenset()) -> None:
        self.recipe = recipe
        self.skipped = skipped
        self.settings = recipe.policies["default"].batches
        self.batches: list[BatchAssembled] = []
        self.groups: list[Any] = []
        self.assembler = BatchAssembler(recipe, "default")
        self.publish(0)

    def publish(self, version: int) -> None:
        self.assembler.on_policy(published(version, version in self.skipped))

    def batch(self) -> BatchAssembled:
        """Makes the next batch; its predecessor's version is published."""
        version = self.assembler.version
        if version:
            self.publish(version)
        for _ in range(self.settings.groups):
            # The policy that sampled it is a version behind now and then.
            oldest = max(0, version - len(self.groups) % 2)
            group = a_group(len(self.groups), oldest, oldest)
            self.groups.append(group)
            self.assembler.on_group(group, group.task)
        made = self.assembler.next_batch(ENDED_S)
        assert made is not None
        assert made == self.assembler.next_batch(ENDED_S), "asking changes nothing"
        self.assembler.on_batch(made)
        self.batches.append(made)
        return made

    def restart(self) -> None:
        """Starts a successor, which reads the last batches alone."""
        self.assembler = BatchAssembler(self.recipe, "default")
        for version in range(len(self.batches)):
            self.publish(version)
        for batch in self.batches[-self.assembler.batches_needed :]:
            self.assembler.on_batch(batch)
        for group in self.groups[self.assembler.groups_read :]:
            self.assembler.on_group(group, group.task)


def published(version: int, skipped: bool) -> PolicyPublished:
    event = a_publication(version)
    return event.model_copy(update={"status": "skipped"}) if skipped else event


def replayed(batch: BatchAssembled) -> list[int]:
    return list(dict.fromkeys(one.task for one in batch.samples if one.use > 0))


def test_a_replayed_sample_counts_its_uses_and_is_weighed() -> None:
    run = Run(a_recipe(groups=2, replay={"share": 0.5, "max_uses": 3, "weight": 0.5}))
    first, second = run.batch(), run.batch()
    [again] = replayed(second)
    assert again in tasks_of(first)
    before = [one for one in first.samples if one.task == again]
    assert [one for one in second.samples if one.use] == [
        one.model_copy(update={"use": 1, "weight": 0.5}) for one in before
    ]
    assert [one.use for one in second.samples] == [0, 0, 1, 1], "fresh samples come first"


def test_a_third_use_is_weighed_twice() -> None:
    replay = {"share": 0.65, "max_uses": 3, "weight": 0.5}
    run = Run(a_recipe(groups=10, replay=replay))
    later = [one for _ in range(12) for one in run.batch().samples if one.use == 2]
    assert {one.weight for one in later} == {0.25}


def test_a_replayed_group_is_not_decided_again() -> None:
    run = Run(a_recipe(replay={"share": 0.5}))
    run.batch()
    second = run.batch()
    assert len(replayed(second)) == 2
    assert second.sampled_tokens == sum(one.tokens for one in second.samples)
    assert second.reward_mean == 1.0
    assert len(second.frontier()) == 6, "four of the first batch, and two fresh ones"
    assert decided_by(second) & set(replayed(second)) == set()


def test_fresh_groups_fill_a_batch_if_the_pool_has_too_few() -> None:
    """With prefetch 1 the first group that may be replayed is two batches old."""
    run = Run(a_recipe(replay={"share": 0.5}, prefetch=1))
    made = [run.batch() for _ in range(4)]
    assert [len(replayed(batch)) for batch in made] == [0, 0, 2, 2]
    assert [len(set(tasks_of(batch))) for batch in made] == [4] * 4


def test_a_batch_waits_for_its_fresh_groups_alone() -> None:
    run = Run(a_recipe(replay={"share": 0.5}))
    run.batch()
    run.publish(1)
    assert run.assembler.next_batch(1e12) is None, "replays alone make no batch"
    run.assembler.on_group(a_group(100, 1), 100)
    assert run.assembler.next_batch(ENDED_S) is None
    short = run.assembler.next_batch(1e12)
    assert short is not None
    fresh = [task for task in tasks_of(short) if task == 100]
    assert fresh == [100]
    assert len(replayed(short)) <= 2, "a short batch has its part of the share"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.1])
def test_the_mix_is_the_share(share: float) -> None:
    run = Run(a_recipe(groups=10, replay={"share": share, "max_age": 8}))
    run.batch()
    made = [run.batch() for _ in range(40)]
    assert sum(len(replayed(batch)) for batch in made) == pytest.approx(share * 400, abs=1)


def test_the_least_used_and_newest_groups_go_first() -> None:
    run = Run(a_recipe(groups=4, replay={"share": 0.25, "max_uses": 8, "max_age": 8}))
    made = [run.batch() for _ in range(6)]
    for batch in made[1:]:
        [again] = replayed(batch)
        assert again in tasks_of(made[batch.version - 2]), "of the batch before"


def test_demonstrations_are_not_replayed() -> None:
    run = Run(a_recipe(groups=2, replay={"share": 0.5}))
    run.assembler.on_group(a_group(0, -1, -1), 0)
    run.assembler.on_group(a_group(1, -1, 0), 1)
    first = run.assembler.next_batch(ENDED_S)
    assert first is not None
    run.assembler.on_batch(first)
    run.publish(1)
    run.assembler.on_group(a_group(2, 1), 2)
    second = run.assembler.next_batch(ENDED_S)
    assert second is not None
    assert [(one.task, one.sample) for one in second.samples if one.use] == [(1, 1)]


def test_what_a_skipped_batch_had_is_not_replayed() -> None:
    """One of its samples may be the reason, and would spoil another batch."""
    run = Run(a_recipe(replay={"share": 0.25}), skipped=frozenset({1}))
    first = run.batch()
    for _ in range(5):
        assert not set(replayed(run.batch())) & set(tasks_of(first))


def test_a_group_that_is_too_old_is_not_replayed() -> None:
    run = Run(a_recipe(groups=2, max_staleness=4, replay={"share": 0.5, "max_age": 3}))
    run.assembler.on_group(a_group(1000, 0), 1000)
    for _ in range(12):
        batch = run.batch()
        for one in batch.samples:
            assert batch.version - 1 - one.oldest_version <= (3 if one.use else 4)


CHANGES = {
    "a newest batch may be untrained": (
        "group.batches[-1] <= self._newest - self._settings.prefetch",
        "group.batches[-1] <= self._newest",
    ),
    "one use more": (
        "if len(batches) < self._replay.max_uses:",
        "if len(batches) <= self._replay.max_uses:",
    ),
    "a version older": (
        "<= self._replay.max_age\n",
        "<= self._replay.max_age + 1\n",
    ),
    "skipped batches": (
        "            and not any(map(self._staleness.skipped, group.batches))\n",
        "",
    ),
    "a successor knows older groups": (
        "if one.batches[0] >= oldest",
        "if True",
    ),
}
"""Rules of the pool, each with a text of the code and what replaces it without the rule."""


@pytest.mark.slow
def test_any_run_keeps_the_rules_and_a_successor_makes_the_same() -> None:
    for seed in range(150):
        check_a_run(Random(seed))


def check_a_run(chance: Random) -> None:
    groups, uses, prefetch = chance.randint(2, 5), chance.randint(2, 4), chance.randint(0, 2)
    most = min(1 - 1 / uses, (groups - 1) / groups)
    replay = {"share": round(chance.uniform(0.02, most - 0.005), 2), "max_uses": uses}
    replay |= {"weight": 0.5, "max_age": prefetch + chance.randint(1, 5)}
    recipe = a_recipe(groups=groups, prefetch=prefetch, replay=replay)
    run = Run(recipe, frozenset(chance.sample(range(1, 11), chance.randint(0, 3))))
    for _ in range(12):
        run.batch()
        if chance.random() < 0.5:
            run.restart()
    judge = Replays(run.settings, run.skipped)
    undisturbed = Run(recipe, run.skipped)
    uses_of: Counter[tuple[int, int]] = Counter()
    rebuilder = Rebuilder(
        recipe, "default", {g.task: g.task for g in run.groups}, len(run.groups), run.skipped
    )
    for batch in run.batches:
        assert not list(judge.on_batch(batch, f"batch {batch.version}"))
        assert batch == undisturbed.batch()
        uses_of.update((one.task, one.sample) for one in batch.samples)
        while rebuilder.wants(batch):
            group = run.groups[rebuilder._next]
            rebuilder.on_group(group, group.task, rebuilt=True)
        assert rebuilder.judge(batch) == "same"
    assert max(uses_of.values()) <= uses


@pytest.mark.parametrize("name", CHANGES)
def test_a_pool_without_a_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = CHANGES[name]
    source = Path(replay_pool.__file__).read_text()
    assert source.count(old) == 1
    mutant: dict[str, Any] = {"__name__": replay_pool.__name__}
    exec(compile(source.replace(old, new), replay_pool.__file__, "exec"), mutant)
    monkeypatch.setattr(batch_assembly, "ReplayPool", mutant["ReplayPool"])

    with pytest.raises(AssertionError):
        test_any_run_keeps_the_rules_and_a_successor_makes_the_same()


def test_advantages_stay_as_they_were_recorded() -> None:
    run = Run(a_recipe(groups=2, replay={"share": 0.5}))
    run.batch()
    assert {one.advantages for one in run.batch().samples} == {pack_f32([1.0])}


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        ({"replay": {"share": 0.6}}, "at most 0.5 of the groups can be replayed"),
        ({"groups": 1, "replay": {"share": 0.5}}, "leaves no fresh group"),
        ({"prefetch": 2, "replay": {"share": 0.2, "max_age": 2}}, "allows no replay"),
        ({"replay": {"share": 0.2, "max_uses": 1}}, "greater than or equal to 2"),
        ({"replay": {"share": 1.0}}, "less than 1"),
    ],
)
def test_a_replay_that_can_not_be_reached_is_refused(batches: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        a_recipe(**batches)

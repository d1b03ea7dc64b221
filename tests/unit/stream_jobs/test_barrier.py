"""What holds the batches of a policy, and what it does with the groups that pile up meanwhile."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeStarted,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    Ref,
    Sampling,
    TaskSubmitted,
    Use,
)
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.replay.rebuilder import Rebuilder
from headrace.stream_jobs.barrier import ENOUGH_BATCHES, PASSED_OVER, Barrier
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.groups import EVALUATE

WAIT_S = 30.0
RECIPE = Recipe.model_validate(
    {
        "name": "r",
        "tasks": {"roles": {"a": "a", "b": "b"}},
        "barrier": {"versions": 1},
        "policies": {
            name: {"model": "tiny", "batches": {"groups": 2, "batch_wait_s": WAIT_S}}
            for name in ("a", "b")
        },
    }
)


def a_group(task: int, policy: str = "a", oldest: int = 0) -> GroupClosed:
    sample = GroupSample(
        sample=0,
        trajectory=Ref(topic="t", partition=0, offset=task, digest=bytes(16)),
        reward=1.0,
        advantages=pack_f32([1.0]),
        tokens=1,
        longest=1,
        oldest_version=oldest,
    )
    return GroupClosed(
        task=task, policy=policy, item_id="i", verdict="scored", samples=(sample,), mean=1.0
    )


def a_version(policy: str, version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy, version=version, status="trained", digest=bytes(32), full_version=version
    )


def a_batch(policy: str, version: int, low_mark: int) -> BatchAssembled:
    return BatchAssembled(
        policy=policy, version=version, recipe=RECIPE.digest, seed=0, samples=(),
        sampled_tokens=0, low_mark=low_mark, groups_read=0,
    )  # fmt: skip


def a_start(task: int) -> EpisodeStarted:
    submitted = TaskSubmitted(
        source="s", task_id=str(task), item_id="i", agent="default", max_turns=1, max_tokens=1,
        deadline_s=100, roles={"a": Use(policy="a", sampling=Sampling(max_tokens=1))},
    )  # fmt: skip
    return EpisodeStarted(task=task, sample=0, submitted=submitted, seed=0, deadline=100_000)


def job() -> tuple[BatchAssembler, Barrier]:
    """A job at batch 1, while both policies are at version 0, with enough groups for batch 2."""
    barrier = Barrier(RECIPE, "a")
    assembler = BatchAssembler(RECIPE, "a", barrier=barrier)
    for policy in ("a", "b"):
        assembler.on_policy(a_version(policy, 0))
        barrier.on_policy(a_version(policy, 0))
    for task in range(4):
        assembler.on_group(a_group(task), task)
        barrier.on_group(a_group(task, "b"))
    batch = assembler.next_batch(1.0)
    assert batch is not None
    assembler.on_batch(batch)
    assembler.on_policy(a_version("a", 1))
    return assembler, barrier


def test_a_batch_waits_for_the_version_of_the_other() -> None:
    assembler, barrier = job()
    assert assembler.next_batch(1.0) is None
    assert assembler.next_batch(1e9) is None, "the other one has groups to train on"
    barrier.on_policy(a_version("b", 1))
    batch = assembler.next_batch(1.0)
    assert batch is not None
    assert batch.version == 2


def test_a_policy_without_work_is_passed_when_nothing_happens_any_more() -> None:
    assembler, barrier = job()
    assert assembler.next_batch(1.0) is None
    barrier.on_batch(a_batch("b", 1, low_mark=4))
    assert assembler.next_batch(1e9) is None, "its batch is not published"
    barrier.on_policy(a_version("b", 1))
    last = assembler.next_batch(2.0)
    assert last is not None
    assembler.on_batch(last)
    assembler.on_policy(a_version("a", 2))
    for task in (4, 5):
        assembler.on_group(a_group(task), task)
    assert assembler.next_batch(3.0) is None, "it has just made a batch, so tasks may start"
    assert assembler.due_at(WAIT_S) == 3.0 + WAIT_S
    assert assembler.next_batch(3.0 + WAIT_S) is not None


def test_a_live_task_is_work_until_it_is_overdue() -> None:
    _, barrier = job()
    barrier.on_start(a_start(9))
    barrier.on_batch(a_batch("b", 1, low_mark=4))
    barrier.on_policy(a_version("b", 1))
    assert barrier.holds(3, 0.0, 0.0), "it was asked only now"
    assert barrier.holds(3, 159.0, 0.0)
    assert 160.0 in barrier.moments()
    assert not barrier.holds(3, 160.0, 0.0)
    assert barrier.holds(3, 160.0, 150.0), "a task was closed 10 s ago"


def test_two_that_wait_for_an_idle_one_do_not_wait_for_each_other() -> None:
    policies = {name: {"model": "tiny"} for name in ("a", "b", "c")}
    tree = {"name": "r", "tasks": {"roles": {"a": "a"}}, "policies": policies, "barrier": {}}
    barrier = Barrier(Recipe.model_validate(tree), "a")
    for policy, version in (("a", 1), ("b", 0), ("c", 0)):
        barrier.on_policy(a_version(policy, version))
    barrier.on_group(a_group(0, "c"))
    assert barrier.holds(2, 0.0, 0.0)
    assert barrier.holds(2, 60.0, 0.0), "c can still train on its group"
    barrier.on_batch(a_batch("c", 1, low_mark=0))
    barrier.on_policy(a_version("c", 1))
    assert not barrier.holds(2, 60.0, 0.0), "c has a group, but waits for b as well"


def test_a_held_job_asks_only_the_barrier_when_to_look_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assembler, barrier = job()
    assert assembler.next_batch(1.0) is None
    asked: list[int] = []

    def patient_until(_: BatchAssembler) -> float:
        asked.append(1)
        return 0.0

    monkeypatch.setattr(BatchAssembler, "_patient_until", patient_until)
    assert assembler.due_at(1.0) is not None
    assert not asked, "it would sort all groups that pile up, at every event"
    barrier.on_policy(a_version("b", 1))
    assembler.due_at(1.0)
    assert asked


def test_of_groups_that_piled_up_some_are_drawn_and_the_others_are_dropped() -> None:
    assembler, barrier = job()
    many = range(4, 4 + 2 * ENOUGH_BATCHES)
    for task in many:
        assembler.on_group(a_group(task, oldest=1), task)
    assert assembler.next_batch(1.0) is None, "it is held"
    barrier.on_policy(a_version("b", 1))
    batch = assembler.next_batch(1.0)
    assert batch is not None
    trained = [one.task for one in batch.samples]
    assert len(trained) == 2
    assert trained != [*many][:2], "not those that go stale first"
    assert trained != [*many][-2:][::-1], "nor the newest, which are the short ones"
    assert {one.reason for one in batch.dropped} == {"barrier"}
    assert batch.low_mark == many[-1] + 1, "it decides all of them"
    assert batch.groups_read == many[-1] + 1
    replayed = BatchAssembler(RECIPE, "a")
    for task in range(many[-1] + 1):
        replayed.on_group(a_group(task, oldest=task >= 4), task)
    replayed.on_policy(a_version("a", 1))
    replayed.on_batch(a_batch("a", 1, low_mark=2))
    assert replayed.next_batch(1.0) == batch


def test_more_groups_than_fit_into_a_batch_are_decided_up_to_an_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a replay would not know how many groups there were when the batch was drawn."""
    monkeypatch.setattr("headrace.stream_jobs.waiting_groups.BATCH_BYTES", 2_000)
    assembler, barrier = job()
    many = range(4, 4 + 32 * ENOUGH_BATCHES)
    for task in many:
        assembler.on_group(a_group(task, oldest=1), task)
    assert assembler.next_batch(1.0) is None
    barrier.on_policy(a_version("b", 1))
    batch = assembler.next_batch(1.0)
    assert batch is not None
    assert {one.reason for one in batch.dropped} == {"barrier"}
    decided = {one.task for one in batch.samples} | {one.task for one in batch.dropped}
    assert decided == set(range(2, 2 + len(decided))), "2 and 3 waited before"
    assert len(decided) < len(many)
    rebuilder = Rebuilder(RECIPE, "a", {task: task for task in range(many[-1] + 1)}, many[-1] + 1)
    rebuilder.judge(a_batch("a", 1, low_mark=2))
    task = 0
    while rebuilder.wants(batch):
        rebuilder.on_group(a_group(task, oldest=task >= 4), task, rebuilt=True)
        task += 1
    assert task < many[-1]
    assert rebuilder.judge(batch) == "same"


@pytest.mark.parametrize("held", [True, False])
def test_a_replay_passes_groups_over_only_if_the_recorded_batch_did(held: bool) -> None:
    assembler, barrier = job()
    many = range(4, 4 + 2 * ENOUGH_BATCHES)
    for task in many:
        assembler.on_group(a_group(task, oldest=1), task)
    if held:
        assert assembler.next_batch(1.0) is None
    barrier.on_policy(a_version("b", 1))
    batch = assembler.next_batch(1.0)
    assert batch is not None
    assert bool(batch.dropped) == held
    tasks = range(many[-1] + 1)
    rebuilder = Rebuilder(RECIPE, "a", {task: task for task in tasks}, len(tasks))
    for task in tasks:
        rebuilder.on_group(a_group(task, oldest=task >= 4), task, rebuilt=True)
    rebuilder.judge(a_batch("a", 1, low_mark=2))
    assert rebuilder.judge(batch) == "same"


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [800, 2_000, 1_000_000])
def test_any_batch_that_drew_is_assembled_again(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever earlier batches decided: they may have decided groups that were closed later."""
    monkeypatch.setattr("headrace.stream_jobs.waiting_groups.BATCH_BYTES", most_bytes)
    drawn = 0
    for seed in range(40):
        recipe, log, made = a_history_with_draws(Random(seed))
        rebuilder = Rebuilder(recipe, "a", {task: task for task in range(len(log))}, len(log))
        offset = 0
        for batch in made:
            while rebuilder.wants(batch):
                rebuilder.on_group(log[offset], offset, rebuilt=True)
                offset += 1
            assert rebuilder.judge(batch) == "same", seed
            drawn += any(one.reason == PASSED_OVER for one in batch.dropped)
    assert drawn > 20


def a_history_with_draws(
    random: Random,
) -> tuple[Recipe, list[GroupClosed], list[BatchAssembled]]:
    """Groups of all kinds, and the batches of a job that was held now and then."""
    batches: dict[str, Any] = {
        "groups": random.choice([2, 3]),
        "batch_wait_s": WAIT_S,
        "order": random.choice(["edf", "fifo"]),
        **random.choice([{}, {"tokens": 5}]),
        **random.choice([{}, {"replay": {"share": 0.5}}]),
    }
    tree = RECIPE.model_dump(mode="json")
    for policy in tree["policies"].values():
        policy["batches"] = batches
    recipe = Recipe.model_validate(tree)
    job = BatchAssembler(recipe, "a")
    job.on_policy(a_version("a", 0))
    log, made = list[GroupClosed](), list[BatchAssembled]()
    for _ in range(random.randint(3, 10)):
        for _ in range(random.choice([0, 3, 20, 90])):
            group = a_group(len(log), oldest=random.choice([-1, len(made), len(made), 0]))
            if random.random() < 0.15:
                reason = random.choice([EVALUATE, "zero_advantage"])
                group = group.model_copy(
                    update={"verdict": "dropped", "reason": reason, "samples": ()}
                )
            job.on_group(group, len(log))
            log.append(group)
        if batch := job.next_batch(1.0, passes_over=random.random() < 0.5):
            made.append(batch)
            job.on_batch(batch)
            job.on_policy(a_version("a", batch.version))
    return recipe, log, made

"""The updates of a batch: every sample is trained once, and a batch that contradicts is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import BatchAssembled, BatchSample, Ref, TrajectoryRecorded
from headrace.schemas.packed import pack_f32, pack_spans
from headrace.trainer.loader import build_updates
from headrace.trainer.metrics.batch_metrics import staleness
from headrace.trainer.sequences import UnusableBatch, UpdateBatch
from tests.unit.trainer.test_sequences import trajectory, turn

REF = Ref(topic="t", partition=0, offset=0, digest=bytes(16))


def recorded(sample: int, tokens: int) -> TrajectoryRecorded:
    """A trajectory that trains so many tokens; each names its sample."""
    one = trajectory(turn([1], [sample] * tokens))
    return one.model_copy(update={"sample": sample})


def batch_of(sizes: list[int], **changes: Any) -> BatchAssembled:
    """A batch whose samples have so many trained tokens."""
    samples = tuple(
        BatchSample(
            task=7, sample=index, trajectory=REF, advantages=pack_f32([1.0]), tokens=tokens,
            longest=tokens + 1, oldest_version=3,
        )
        for index, tokens in enumerate(sizes)
    )  # fmt: skip
    values: dict[str, Any] = {
        "policy": "p", "version": 5, "recipe": bytes(32), "seed": 0, "samples": samples,
        "sampled_tokens": sum(sizes), "low_mark": 0, "groups_read": 0,
    }  # fmt: skip
    return BatchAssembled(**values | changes)


def build(sizes: list[int], updates: int) -> list[UpdateBatch]:
    events = [recorded(index, tokens) for index, tokens in enumerate(sizes)]
    built, dropped = build_updates(batch_of(sizes), events, 100, updates)
    assert not dropped
    return built


def samples_of(update: UpdateBatch) -> list[int]:
    return [int(one.tokens[-1]) for one in update.sequences]


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 6))
def test_every_sample_is_trained_once_and_counted_once(sizes: list[int], updates: int) -> None:
    built = build(sizes, updates)

    assert len(built) == min(updates, len(sizes))
    assert sorted(sample for update in built for sample in samples_of(update)) == [
        *range(len(sizes))
    ]
    for update in built:
        assert update.tokens == sum(sizes[sample] for sample in samples_of(update))


def test_a_groups_samples_are_spread_over_the_updates() -> None:
    assert [samples_of(update) for update in build([1] * 8, 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_an_update_without_tokens_is_left_out() -> None:
    assert build([], 3) == []
    assert [samples_of(update) for update in build([0, 3], 2)] == [[1]]


@pytest.mark.parametrize(
    ("batch", "event", "reason"),
    [
        (batch_of([2], sampled_tokens=3), recorded(0, 2), "states 3 trainable tokens"),
        (batch_of([2]), recorded(0, 1), "has 1 trainable tokens, the batch states 2"),
        (batch_of([2]), recorded(1, 2), "names task 7 sample 1"),
        (batch_of([2]), batch_of([]), "names a BatchAssembled"),
    ],
)
def test_a_batch_that_contradicts_its_trajectories_is_refused(
    batch: BatchAssembled, event: Any, reason: str
) -> None:
    with pytest.raises(UnusableBatch, match=reason):
        build_updates(batch, [event], 100, 1)


def test_one_sample_that_contradicts_costs_only_itself() -> None:
    """The other samples stay in their updates."""
    events = [recorded(0, 2), recorded(1, 9), recorded(2, 1), recorded(3, 4)]
    built, dropped = build_updates(batch_of([2, 3, 1, 4]), events, 100, 2)
    assert [samples_of(update) for update in built] == [[0, 2], [3]]
    assert [update.tokens for update in built] == [3, 4]
    [reason] = dropped
    assert reason.startswith("task 7 sample 1: ")
    assert "has 9 trainable tokens, the batch states 3" in reason


def test_with_a_critic_the_numbers_of_a_sample_are_rewards_of_its_turns() -> None:
    """A sample with a wrong number of them costs only itself."""
    turns = [turn([1], [2, 3]), turn([4], [5], parent=0)]
    events = [trajectory(*turns).model_copy(update={"sample": one}) for one in range(3)]
    batch = batch_of([3, 3, 3])
    given = [(0.5, -1.0), (2.0,), (1.0, 1.0, 1.0)]
    samples = [
        one.model_copy(update={"advantages": pack_f32(rewards), "weight": 0.5})
        for one, rewards in zip(batch.samples, given, strict=True)
    ]
    batch = batch.model_copy(update={"samples": tuple(samples)})

    [update], dropped = build_updates(batch, events, 100, 1, critic=True)

    rewards = [one.rewards.tolist() for one in update.sequences if one.rewards is not None]
    assert rewards == [[0.0, 0.5, -1.0], [0.0, 0.0, 2.0]]
    assert [one.advantages.tolist() for one in update.sequences] == [[0.5] * 3] * 2
    [reason] = dropped
    assert reason == "task 7 sample 2: 3 rewards for 2 turns of policy 'p'"


def test_sequences_name_their_sample() -> None:
    built = build([2, 3], 1)
    names = [one.name for one in built[0].sequences]
    assert names == ["task 7 sample 0", "task 7 sample 1"]


def test_staleness_counts_from_the_version_before_the_batchs() -> None:
    """Batch 5 starts from version 4; the tokens were sampled by version 3."""
    expected = {"staleness_mean": 1.0, "staleness_max": 1.0, "staleness_oldest": 1.0}
    assert staleness(batch_of([2]), build([2], 1)) == expected
    assert staleness(batch_of([]), []) == {}


def test_the_oldest_token_of_each_sample_counts_for_its_staleness() -> None:
    """Three tokens of version 4 and one of version 2, then two of version 4."""
    events = [recorded(0, 4), recorded(1, 2)]
    for event, versions in zip(events, ([2, 4, 4, 4], [4, 4]), strict=True):
        object.__setattr__(event.turns[0], "versions", pack_spans(versions))
    batch = batch_of([4, 2])

    found = staleness(batch, build_updates(batch, events, 100, 2)[0])

    assert found == {"staleness_mean": 2 / 6, "staleness_max": 2.0, "staleness_oldest": 1.0}


def test_a_sequence_knows_its_sample_and_its_group() -> None:
    samples = batch_of([1, 1, 1]).samples
    batch = batch_of([1, 1, 1], samples=(
        samples[0], samples[1], samples[2].model_copy(update={"task": 9})
    ))  # fmt: skip
    events = [recorded(index, 1) for index in range(3)]
    events[2] = events[2].model_copy(update={"task": 9})

    [update], _ = build_updates(batch, events, 100, 1)

    assert [(one.sample, one.group) for one in update.sequences] == [(0, 0), (1, 0), (2, 1)]
    assert update.newest == 4


def test_the_teachers_logprobs_come_with_the_tokens() -> None:
    scored = trajectory(turn([1], [0, 0], teacher=pack_f32([-0.5, -7.0])))
    scored = scored.model_copy(update={"sample": 0})
    [update], dropped = build_updates(batch_of([2]), [scored], 100, 1, taught=True)
    assert not dropped
    found = update.sequences[0].teacher
    assert found is not None
    assert found.tolist() == [-0.5, -7.0]
    # A policy without a teacher ignores them.
    [update], _ = build_updates(batch_of([2]), [scored], 100, 1)
    assert update.sequences[0].teacher is None


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([], "0 logprobs by its teacher for 2 tokens"),
        ([-1.0], "1 logprobs by its teacher for 2 tokens"),
        ([-1.0, float("-inf")], "by its teacher is above 0, infinite or not a number"),
        ([-1.0, 0.5], "by its teacher is above 0"),
    ],
)
def test_a_sample_that_its_teacher_did_not_score_is_dropped(
    logprobs: list[float], reason: str
) -> None:
    bad = trajectory(turn([1], [0, 0], teacher=pack_f32(logprobs)))
    bad = bad.model_copy(update={"sample": 0})
    good = trajectory(turn([1], [1], teacher=pack_f32([-1.0]))).model_copy(update={"sample": 1})
    built, dropped = build_updates(batch_of([2, 1]), [bad, good], 100, 1, taught=True)
    assert [samples_of(update) for update in built] == [[1]]
    assert reason in dropped[0]

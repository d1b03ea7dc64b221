"""The plan of a batch: each sequence once, bounded micro-batches, as many steps on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import PackedMicroBatch, SampleOrigin, TrainingBatch, plan
from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.trainer.packing import micro_batches
from headrace.trainer.packing.micro_batches import divide
from headrace.trainer.sequences import TokenSequence

WARM = Sampling(max_tokens=2, temperature=0.5)


def sequence(sample: int, length: int, trained: int = 1) -> TokenSequence:
    """Its tokens are 100 times the sample, then that plus 1, and so on; the last are trained."""
    positions = np.arange(length - trained, length)
    return TokenSequence(
        tokens=100 * sample + np.arange(length),
        positions=positions,
        behaviour=np.full(trained, -0.5, np.float32),
        advantages=np.full(trained, sample, np.float32),
        versions=np.full(trained, 3),
        samplings=((WARM, trained),),
        demonstrated=np.zeros(trained, np.bool_),
        sample=sample,
    )


def batch_of(*sequences: TokenSequence) -> TrainingBatch:
    origins = {
        one.sample: SampleOrigin(7, one.sample, 1, None if one.sample else 0.25, 1.0, 0)
        for one in sequences
    }
    return TrainingBatch(4, False, sequences, origins, 0, {})


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 5), st.integers(1, 60))
def test_each_sequence_is_in_one_micro_batch(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    divided = divide(lengths, ranks, max_tokens)

    assert len(divided) == ranks
    assert len({len(of_rank) for of_rank in divided}) == 1
    bins = [one for of_rank in divided for one in of_rank]
    assert sorted(index for one in bins for index in one) == [*range(len(lengths))]
    for one in bins:
        assert len(one) <= 1 or sum(lengths[index] for index in one) <= max_tokens
    assert divided == divide(lengths, ranks, max_tokens)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=200), st.integers(1, 4))
def test_no_step_is_empty_if_sequences_are_longer_than_a_micro_batch(
    lengths: list[int], ranks: int
) -> None:
    divided = divide(lengths, ranks, 16_384)
    for step in zip(*divided, strict=True):
        assert any(step), "all ranks would run the model in vain"


def test_thousands_of_long_sequences_are_divided_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []
    fill = micro_batches._fill

    def counted(*arguments: Any) -> Any:
        tries.append(arguments[3])
        return fill(*arguments)

    monkeypatch.setattr(micro_batches, "_fill", counted)
    assert len(divide([9_000] * 1_000, 1, 16_384)[0]) == 1_000
    assert len(divide([1_100, 900] * 1_000, 4, 2_048)[0]) == 250
    assert len(tries) == 2
    divide([6_000] * 1_000, 1, 16_384)
    assert len(tries) < 40


def test_the_steps_of_all_ranks_have_similar_sizes() -> None:
    lengths = [*range(1, 65)]
    divided = divide(lengths, 4, 130)

    for step in zip(*divided, strict=True):
        sizes = [sum(lengths[index] for index in one) for one in step]
        assert max(sizes) - min(sizes) <= 40


def test_a_micro_batch_says_what_each_token_is() -> None:
    one, two = sequence(0, 3, trained=2), sequence(1, 2)
    [[packed]] = plan(batch_of(one, two), ranks=1, max_tokens=5)

    assert packed.tokens.tolist() == [0, 1, 2, 100, 101]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1]
    assert packed.segments.tolist() == [0, 0, 0, 1, 1]
    assert packed.samples.tolist() == [0, 0, 0, 1, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.loss_mask.tolist() == [False, True, True, False, True]
    assert packed.logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert packed.advantages.tolist() == [0, 0, 0, 0, 1]
    assert packed.rewards[:3].tolist() == [0.25] * 3
    assert np.isnan(packed.rewards[3:]).all()
    assert packed.versions.tolist() == [-1, 3, 3, -1, 3]
    assert packed.temperatures.tolist() == [1, 0.5, 0.5, 1, 0.5]
    assert packed.samplings == (WARM,)
    assert packed.teacher is None
    assert [(each.task, each.sample, each.attempt) for each in packed.origins] == [
        (7, 0, 1), (7, 1, 1),
    ]  # fmt: skip


def test_a_rank_without_work_gets_an_empty_micro_batch() -> None:
    first, second = plan(batch_of(sequence(0, 3)), ranks=2, max_tokens=8)

    assert len(first[0].tokens) == 3
    empty: PackedMicroBatch = second[0]
    assert len(empty.tokens) == 0
    assert empty.cu_seqlens.tolist() == [0]
    assert len(empty.temperatures) == len(empty.loss_mask) == 0


def test_a_batch_is_split_for_several_updates() -> None:
    batch = batch_of(*(sequence(number, 2) for number in range(5)))

    parts = batch.split(2)
    assert [[one.sample for one in part.sequences] for part in parts] == [[0, 2, 4], [1, 3]]
    assert [part.tokens for part in parts] == [3, 2]


def test_a_batch_can_be_sent_to_other_ranks() -> None:
    batch = batch_of(sequence(0, 3))
    [[sent]] = plan(pickle.loads(pickle.dumps(batch)), ranks=1, max_tokens=8)
    assert sent.tokens.tolist() == [0, 1, 2]


def test_a_plan_needs_a_rank_and_a_token() -> None:
    for ranks, max_tokens in ((0, 8), (1, 0)):
        with pytest.raises(UsageError, match="use at least 1"):
            plan(batch_of(), ranks, max_tokens)

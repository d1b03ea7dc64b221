"""The trainer's logprobs in the blob store: which number belongs to which token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import BatchAssembled, BatchSample, Ref, Sampling, Turn
from headrace.schemas.packed import pack_i32
from headrace.trainer.metrics.recorded_logprobs import (
    pack_logprobs,
    read_logprobs,
    trained_turns,
)
from headrace.trainer.sequences import Floats, TokenSequence

TRAJECTORY = Ref(topic="t", partition=0, offset=0, digest=bytes(16))


def batch_of(*tokens: int) -> BatchAssembled:
    """A batch whose samples have so many tokens."""
    samples = tuple(
        BatchSample(
            task=0, sample=number, trajectory=TRAJECTORY,
            advantages=b"", tokens=count, longest=count, oldest_version=0,
        )
        for number, count in enumerate(tokens)
    )  # fmt: skip
    return BatchAssembled(
        policy="default", version=1, recipe=bytes(32), seed=0, samples=samples,
        sampled_tokens=sum(tokens), reward_mean=0.0, low_mark=0, groups_read=0,
    )  # fmt: skip


def sequence(sample: int, turns: dict[int, int]) -> TokenSequence:
    """A sequence that trains these turns, each with its number of tokens."""
    count = sum(turns.values())
    zeros: Floats = np.zeros(count, np.float32)
    return TokenSequence(
        tokens=np.zeros(count + 1, np.int64), positions=np.arange(1, count + 1),
        behaviour=zeros, advantages=zeros, versions=np.zeros(count, np.int64),
        samplings=tuple((Sampling(max_tokens=1), one) for one in turns.values()),
        demonstrated=np.zeros(count, np.bool_), sample=sample, turns=tuple(turns),
    )  # fmt: skip


def test_turns_have_the_order_of_the_trajectory_and_samples_that_of_the_batch(
    tmp_path: Path,
) -> None:
    batch = batch_of(2, 4, 1)
    found = [
        (sequence(1, {0: 1, 3: 1}), np.array([-1.0, -4.0], np.float32)),
        (sequence(0, {1: 2}), np.array([-8.0, -9.0], np.float32)),
        (sequence(1, {2: 2}), np.array([-2.0, -3.0], np.float32)),  # another branch
    ]
    packed = pack_logprobs(batch, found)
    assert packed[:24] == np.array([-8, -9, -1, -2, -3, -4], "<f4").tobytes()
    file = tmp_path / "blob"
    file.write_bytes(packed)
    assert [list(one) for one in map_samples(file, batch, 0, 1)] == [[-8, -9], [-1, -2, -3, -4]]
    assert read_logprobs(file, batch, 2) is None  # the trainer dropped it


def map_samples(file: Path, batch: BatchAssembled, *indices: int) -> list[Floats]:
    found = [read_logprobs(file, batch, index) for index in indices]
    return [one for one in found if one is not None]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_every_sample_reads_its_own_numbers(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int]
) -> None:
    batch, file = batch_of(*tokens), tmp_path_factory.getbasetemp() / "logprobs"
    numbers = np.random.default_rng(sum(tokens)).normal(size=sum(tokens)).astype(np.float32)
    parts = np.split(numbers, np.cumsum(tokens)[:-1])
    found = [(sequence(place, {0: len(part)}), part) for place, part in enumerate(parts)]
    file.write_bytes(pack_logprobs(batch, reversed(found)))
    for place, part in enumerate(parts):
        assert np.array_equal(map_samples(file, batch, place)[0], part)


def test_a_file_of_another_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "blob"
    file.write_bytes(bytes(12))
    with pytest.raises(ValueError, match="each of 2 tokens"):
        read_logprobs(file, batch_of(2), 0)


def test_only_turns_that_the_policy_trains_count() -> None:
    def turn(policy: str, tokens: int, trainable: bool = True) -> Turn:
        return Turn(
            parent=-1, call="0", policy=policy, context=b"", tokens=pack_i32([1] * tokens),
            trainable=trainable,
        )  # fmt: skip

    turns = [turn("a", 2), turn("b", 3), turn("a", 4, trainable=False), turn("a", 0), turn("a", 1)]
    assert trained_turns(turns, "a") == {0: 2, 4: 1}

"""From trees of turns to token sequences; what contradicts itself is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import Sampling, TrajectoryRecorded, Turn
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.trainer.sequences import TokenSequence, UnusableBatch, token_sequences

PLAIN = Sampling(max_tokens=8)


def turn(context: list[int], tokens: list[int], parent: int = -1, **fields: Any) -> Turn:
    values: dict[str, Any] = {
        "parent": parent,
        "call": "1",
        "policy": "p",
        "context": pack_i32(context),
        "tokens": pack_i32(tokens),
        "logprobs": pack_f32([-0.5 - token / 100 for token in tokens]),
        "versions": pack_spans([3] * len(tokens)),
    }
    return Turn(**{**values, **fields})


def trajectory(*turns: Turn, samplings: tuple[Sampling, ...] = (PLAIN,)) -> TrajectoryRecorded:
    return TrajectoryRecorded(
        task=7,
        sample=2,
        source="s",
        task_id="t",
        item_id="i",
        samplings=samplings,
        turns=turns,
        agent="a",
        ending="finished",
        started=0,
        ended=1,
    )


def read(
    recorded: TrajectoryRecorded, advantages: list[float] | None = None, weight: float = 1.0
) -> list[TokenSequence]:
    return token_sequences(recorded, "p", advantages or [1.0], weight, vocabulary=100)


def test_a_chain_of_turns_is_one_sequence() -> None:
    one = turn([1, 2], [3, 4], versions=pack_spans([3, 4]))
    two = turn([5], [6], parent=0, logprobs=pack_f32([-2.0]))

    [sequence] = read(trajectory(one, two), [0.5, -1.0], weight=2.0)

    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequence.positions.tolist() == [2, 3, 5]
    assert sequence.behaviour.tolist() == np.array([-0.53, -0.54, -2.0], dtype=np.float32).tolist()
    assert sequence.advantages.tolist() == [1.0, 1.0, -2.0]
    assert sequence.versions.tolist() == [3, 4, 3]
    assert sequence.samplings == ((PLAIN, 2), (PLAIN, 1))


def said(context: list[int], tokens: list[int], parent: int = -1, **fields: Any) -> Turn:
    bare = {"logprobs": b"", "versions": b"", "demonstrated": True}
    return turn(context, tokens, parent, **{**bare, **fields})


def test_demonstrated_tokens_are_weighed_by_the_sample_alone() -> None:
    turns = (said([1], [2, 3]), turn([4], [5], parent=0), said([6], [7], parent=1))

    [sequence] = read(trajectory(*turns), [0.5, -1.0, 0.5], weight=2.0)

    assert sequence.positions.tolist() == [1, 2, 4, 6]
    assert sequence.demonstrated.tolist() == [True, True, False, True]
    assert sequence.advantages.tolist() == [2.0, 2.0, -2.0, 2.0]
    assert sequence.versions.tolist() == [-1, -1, 3, -1]
    assert sequence.behaviour[sequence.demonstrated].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("field", ["logprobs", "versions"])
def test_what_was_demonstrated_can_not_have_been_drawn(field: str) -> None:
    drawn = turn([1], [2])
    with pytest.raises(UnusableBatch, match="demonstrated"):
        read(trajectory(said([1], [2], **{field: getattr(drawn, field)})))


def test_a_turn_shared_by_branches_is_trained_once() -> None:
    root, left, right = turn([1], [2]), turn([3], [4], parent=0), turn([5], [6], parent=0)

    sequences = read(trajectory(root, left, right))

    assert [one.tokens.tolist() for one in sequences] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [one.positions.tolist() for one in sequences] == [[1, 3], [3]]


def test_only_the_own_trainable_turns_are_trained() -> None:
    turns = (
        turn([1], [2]),
        turn([3], [4], parent=0, trainable=False),
        turn([5], [99], parent=1, policy="other"),
        turn([6], [7], policy="other"),
        turn([8], []),
    )

    [sequence] = read(trajectory(*turns))

    assert sequence.tokens.tolist() == [1, 2]
    assert sequence.positions.tolist() == [1]


def test_advantages_are_one_a_turn_of_the_own_policy() -> None:
    turns = (
        turn([1], [2]),
        turn([3], [4], parent=0, policy="other"),
        turn([5], [6], parent=1, trainable=False),
        turn([7], [8, 9], parent=2),
    )

    [sequence] = read(trajectory(*turns), [0.1, 0.2, 0.3])

    assert sequence.positions.tolist() == [1, 7, 8]
    assert sequence.advantages.tolist() == np.array([0.1, 0.3, 0.3], dtype=np.float32).tolist()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (turn([1], [2, 3], logprobs=pack_f32([-1.0])), "1 logprobs for 2 tokens"),
        (turn([1], [2], logprobs=pack_f32([0.5])), "above 0"),
        (turn([1], [2], logprobs=pack_f32([float("nan")])), "not a number"),
        (turn([1], [2], logprobs=pack_f32([float("-inf")])), "infinite"),
        (turn([1], [2], logprobs=b"\0\0"), "multiple"),
        (turn([1], [2]).model_copy(update={"tokens": b"\0\0\0"}), "multiple"),
        (turn([1], [2], versions=b""), "are not spans"),
        (turn([1], [2], versions=pack_i32([1, 3])), "are not spans"),
        (turn([1], [2], versions=pack_i32([0, 3, 1, 4])), "start at token 1"),
        (turn([1], [100]), "outside of the model's 100"),
        (turn([-1], [2]), "outside of the model's 100"),
        (turn([1], [2], parent=0), "its parent is turn 0"),
        (turn([1], [2], parent=-2), "its parent is turn -2"),
        (turn([1], [2], sampling=1), "sampling 1 of 1"),
        (turn([1], [2], sampling=-1), "sampling -1 of 1"),
        (turn([], [2]), "no context"),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused(wrong: Turn, reason: str) -> None:
    with pytest.raises(UnusableBatch, match=reason) as caught:
        read(trajectory(wrong))
    assert "task 7 sample 2" in str(caught.value)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1, temperature=0.0),
        Sampling(max_tokens=1, top_p=0.9),
        Sampling(max_tokens=1, top_k=5),
        Sampling(max_tokens=1, min_p=0.1),
    ],
)
def test_tokens_whose_logprobs_cant_be_recomputed_are_refused(sampling: Sampling) -> None:
    with pytest.raises(UnusableBatch, match="can't be recomputed"):
        read(trajectory(turn([1], [2]), samplings=(sampling,)))


def test_a_token_that_was_not_allowed_is_refused() -> None:
    allowed = Sampling(max_tokens=1, allowed=pack_i32([2, 3]))
    [sequence] = read(trajectory(turn([1], [3]), samplings=(allowed,)))
    assert sequence.samplings == ((allowed, 1),)
    with pytest.raises(UnusableBatch, match="does not allow"):
        read(trajectory(turn([1], [4]), samplings=(allowed,)))


def test_a_wrong_number_of_advantages_is_refused() -> None:
    turns = (turn([1], [2]), turn([1], [2]), turn([1], [2]))
    with pytest.raises(UnusableBatch, match="2 advantages for 3 turns"):
        read(trajectory(*turns), [1.0, 2.0])


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30), st.data())
def test_every_trainable_token_of_a_tree_is_trained_once(
    choices: list[int], data: st.DataObject
) -> None:
    """Turn i draws token 2 i + 1 after context 2 i: a token names its turn."""
    turns = [
        turn(
            [2 * index],
            [2 * index + 1],
            parent=min(parent, index - 1),
            trainable=data.draw(st.booleans()),
        )
        for index, parent in enumerate(choices)
    ]

    sequences = read(trajectory(*turns))

    trained = [int(one.tokens[position]) for one in sequences for position in one.positions]
    assert sorted(trained) == [2 * i + 1 for i, one in enumerate(turns) if one.trainable]
    for one in sequences:
        for before, after in zip(one.tokens[1::2], one.tokens[3::2], strict=False):
            assert turns[int(after) // 2].parent == int(before) // 2

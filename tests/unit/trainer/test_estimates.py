"""Generalized advantage estimation against a plain reference, and which token gets a reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.schemas.events import Sampling
from headrace.schemas.recipe.learning.critic_settings import CriticSettings
from headrace.trainer.critic.estimates import (
    Estimates,
    estimate,
    normalized,
    value_metrics,
    with_rewards,
)
from headrace.trainer.sequences import TokenSequence, UnusableBatch, token_sequences
from tests.unit.trainer.test_sequences import said, trajectory, turn

Doubles = NDArray[np.float64]


def reference(
    rewards: list[float], values: list[float], discount: float, gae_lambda: float
) -> list[float]:
    """The definition, term by term: A[t] is the sum of (discount * lambda)^l * delta[t + l]."""
    steps = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * after[t] - values[t] for t in range(steps)]
    return [
        sum((discount * gae_lambda) ** (later - t) * deltas[later] for later in range(t, steps))
        for t in range(steps)
    ]


def sequence(sample: int, turns: dict[int, list[float]], shown: frozenset[int]) -> TokenSequence:
    """A sequence with the rewards of the tokens of each turn. `shown` turns are demonstrated."""
    rewards = np.array([one for of in turns.values() for one in of], dtype=np.float32)
    demonstrated = [number in shown for number, of in turns.items() for _ in of]
    return TokenSequence(
        tokens=np.arange(len(rewards) + 1),
        positions=np.arange(1, len(rewards) + 1),
        behaviour=np.zeros(len(rewards), dtype=np.float32),
        advantages=np.ones(len(rewards), dtype=np.float32),
        versions=np.zeros(len(rewards), dtype=np.int64),
        samplings=tuple((Sampling(max_tokens=1), len(of)) for of in turns.values()),
        demonstrated=np.array(demonstrated, dtype=np.bool_),
        sample=sample,
        turns=tuple(turns),
        rewards=rewards,
    )


@given(st.data())
def test_the_estimates_of_any_update_are_those_of_the_definition(data: st.DataObject) -> None:
    """Samples are split over sequences, their turns are mixed, and some are demonstrated."""
    numbers = st.floats(-2, 2, width=32)
    discount, gae_lambda, value_lambda = (data.draw(st.floats(0, 1)) for _ in range(3))
    shown: dict[int, frozenset[int]] = {}
    sequences: list[TokenSequence] = []
    for sample in range(data.draw(st.integers(1, 4))):
        rewards = data.draw(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1))
        by_turn = dict(enumerate(rewards))
        shown[sample] = frozenset(data.draw(st.sets(st.sampled_from(range(len(rewards))))))
        cut = data.draw(st.integers(0, len(rewards) - 1))
        parts = [range(cut, len(rewards)), range(cut)]
        sequences += [
            sequence(sample, {turn: by_turn[turn] for turn in part}, shown[sample])
            for part in parts
            if part
        ]
    total = sum(len(one.positions) for one in sequences)
    values = np.array(data.draw(st.lists(numbers, min_size=total, max_size=total)))
    sampled = sorted(
        (one.sample, turn, token)
        for one in sequences
        for turn, (_, count) in zip(one.turns, one.samplings, strict=True)
        for token in range(count)
        if turn not in shown[one.sample]
    )
    if not sampled:
        return
    settings = CriticSettings(discount=discount, gae_lambda=gae_lambda, value_lambda=value_lambda)

    found = estimate(settings, sequences, values)

    flat = [
        (one.sample, turn, token)
        for one in sequences
        for turn, (_, count) in zip(one.turns, one.samplings, strict=True)
        for token in range(count)
    ]
    assert [flat[index] for index in found.tokens] == sampled
    flat_rewards = np.concatenate([one.rewards for one in sequences if one.rewards is not None])
    for sample in {one for one, _, _ in sampled}:
        chosen = [place for place, one in enumerate(sampled) if one[0] == sample]
        tokens = found.tokens[chosen]
        known = flat_rewards[tokens].tolist(), values[tokens].tolist(), discount
        advantages = reference(*known, gae_lambda)
        returns = np.array(reference(*known, value_lambda)) + values[tokens]
        np.testing.assert_allclose(found.advantages[chosen], advantages, atol=1e-6)
        np.testing.assert_allclose(found.returns[chosen], returns, atol=1e-6)
        np.testing.assert_array_equal(found.values[chosen], values[tokens])


def test_with_lambda_1_returns_are_the_rewards_that_follow() -> None:
    one = sequence(0, {0: [0.0, 1.0], 2: [0.0, 0.5]}, frozenset())
    values = np.array([0.3, -0.2, 7.0, 0.1])
    found = estimate(CriticSettings(), [one], values)
    assert found.returns == pytest.approx([1.5, 1.5, 0.5, 0.5])
    assert found.advantages == pytest.approx(found.returns - values)


def test_an_episode_of_32000_tokens_is_estimated_exactly() -> None:
    """A lambda of 1 carries the reward to the first token; one of 0.95 does not."""
    one = sequence(0, {0: [0.0] * 31_999 + [1.0]}, frozenset())
    values = np.zeros(32_000)
    assert estimate(CriticSettings(), [one], values).advantages[0] == 1.0
    short = estimate(CriticSettings(gae_lambda=0.95), [one], values)
    assert short.advantages[0] == pytest.approx(0.0, abs=1e-300)
    assert short.advantages[-14] == pytest.approx(0.95**13)


def rewards_by_turn(recorded: Any, rewards: list[float]) -> list[list[float]]:
    sequences = token_sequences(recorded, "p", [1.0], 1.0, vocabulary=100)
    found = with_rewards(sequences, recorded, "p", rewards)
    return [one.rewards.tolist() for one in found if one.rewards is not None]


def test_a_reward_belongs_to_the_last_token_of_its_turn() -> None:
    chain = trajectory(turn([1], [2, 3]), turn([4], [5], parent=0), turn([6], [7, 8], parent=1))
    assert rewards_by_turn(chain, [0.5, -1.0, 2.0]) == [[0.0, 0.5, -1.0, 0.0, 2.0]]
    assert rewards_by_turn(chain, [2.0]) == [[0.0, 0.0, 0.0, 0.0, 2.0]]


def test_branches_and_other_policies_keep_their_rewards_apart() -> None:
    tree = trajectory(
        turn([1], [2]),
        turn([3], [4], parent=0, policy="other"),
        turn([5], [6, 7], parent=0),
        turn([8], [9], parent=1),
    )
    assert rewards_by_turn(tree, [1.0, 2.0, 4.0]) == [[1.0, 0.0, 2.0], [4.0]]


def test_a_turn_without_sampled_tokens_gives_its_reward_to_the_one_before() -> None:
    """What a demonstration earns before the policy's first token is not the policy's."""
    shown = said([1], [2])
    mixed = trajectory(
        shown,
        turn([3], [4, 5], parent=0),
        said([6], [7], parent=1),
        turn([8], [], parent=2),
        turn([9], [10], parent=3, trainable=False),
    )
    assert rewards_by_turn(mixed, [9.0, 1.0, 2.0, 4.0, 8.0]) == [[0.0, 0.0, 15.0, 0.0]]
    assert rewards_by_turn(trajectory(shown), [1.0]) == [[0.0]]


def test_a_wrong_number_of_rewards_is_refused() -> None:
    with pytest.raises(UnusableBatch, match="2 rewards for 3 turns of policy 'p'"):
        rewards_by_turn(trajectory(*(turn([1], [2]) for _ in range(3))), [1.0, 2.0])


def estimates(advantages: list[float], **arrays: list[float]) -> Estimates:
    zeros = np.zeros(len(advantages))
    given = {name: np.array(one) for name, one in arrays.items()}
    return Estimates(
        **{"tokens": np.arange(len(zeros)), "values": zeros, "returns": zeros, **given},
        advantages=np.array(advantages),
    )


def test_a_reward_whose_square_is_infinite_drops_its_sample_alone() -> None:
    recorded = trajectory(turn([1], [2]))
    sequences = token_sequences(recorded, "p", (1.0,), 1.0, 100)
    with pytest.raises(UnusableBatch, match="1e\\+20"):
        with_rewards(sequences, recorded, "p", [1e20])
    with_rewards(sequences, recorded, "p", [-1e15])


def test_advantages_are_normalized_over_all_updates_of_a_batch() -> None:
    first, second = normalized([estimates([1.0, 2.0]), estimates([6.0])])
    together = [*first.advantages, *second.advantages]
    mean, deviation = 3.0, np.sqrt((4 + 1 + 9) / 3)
    assert together == pytest.approx([(one - mean) / deviation for one in (1.0, 2.0, 6.0)])
    [equal] = normalized([estimates([0.7, 0.7, 0.7])])
    assert equal.advantages == pytest.approx([0.0] * 3, abs=1e-6)


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant() -> None:
    for values, share in (([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)):
        metrics = value_metrics([estimates([0.0, 0.0], values=values, returns=[1.0, 3.0])])
        assert metrics["explained_variance"] == pytest.approx(share)
    known = value_metrics([estimates([0.0], values=[0.5], returns=[2.0])])
    assert known == {"value_mean": 0.5, "return_mean": 2.0}

"""The rewards of turns, as a critic gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.schemas.events import EpisodeEnded, GroupClosed
from headrace.schemas.packed import unpack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.stream_jobs.groups import GroupAssembler
from tests.unit.stream_jobs.test_groups import RECORDED_MS, a_task, an_outcome
from tests.unit.stream_jobs.test_turn_returns import NAN, played

RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "policies": {
            "default": {
                "model": "tiny-llama",
                "groups": {"advantage": "rewards"},
                "training": {"critic": {}},
            }
        },
    }
)


def close(outcomes: Sequence[EpisodeEnded], **changes: Any) -> GroupClosed:
    (closed,) = GroupAssembler(RECIPE).on_task(a_task(outcomes, **changes), RECORDED_MS)
    return closed


def test_the_rewards_of_each_sample_add_up_to_its_own() -> None:
    """Also with a limit's penalty, and if the log has only the episode's reward."""
    closed = close(
        [
            played(0, [NAN, 1.0]),
            played(1, [0.5, NAN], reward=-1.0, ending="turn_limit"),
            played(2, [0.25, 0.25], reward=0.25, ending="token_limit"),
            played(3, b"", reward=0.75),
        ]
    )
    rewards = [unpack_f32(sample.advantages) for sample in closed.samples]
    assert rewards == [[0.0, 1.0], [0.5, -1.5], [0.25, 0.0], [0.75]]
    assert [sum(of) for of in rewards] == [sample.reward for sample in closed.samples]
    assert closed.estimator == "rewards"


def test_a_group_of_one_sample_without_a_reward_is_learned() -> None:
    closed = close([an_outcome(0, 0.0)])
    assert closed.verdict == "scored"
    assert [unpack_f32(sample.advantages) for sample in closed.samples] == [[0.0]]

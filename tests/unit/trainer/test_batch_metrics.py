"""What a batch says before training: solved groups, lengths by outcome, cut episodes, drops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import Dropped, TrajectoryRecorded
from headrace.trainer.metrics.batch_metrics import (
    MOST_REASONS,
    TrainedEpisode,
    drops,
    episode_metrics,
    trained_episodes,
    was_cut,
)
from tests.unit.trainer.test_loader import batch_of, recorded
from tests.unit.trainer.test_sequences import trajectory, turn


def episode(task: int, reward: float, tokens: int = 1, cut: bool = False) -> TrainedEpisode:
    return TrainedEpisode(task, reward, tokens, cut)


def test_groups_are_solved_by_all_by_none_or_by_some() -> None:
    groups = [(1.0, 1.0), (0.0, 0.5), (0.0, 1.0), (0.2, 0.2)]
    episodes = [episode(task, one) for task, both in enumerate(groups) for one in both]
    found = episode_metrics(episodes, passing=1.0)
    assert found["groups_solved_by_all"] == 0.25
    assert found["groups_solved_by_none"] == 0.5
    assert (found["groups"], found["groups_equal"]) == (4, 0.5)
    assert episode_metrics(episodes, passing=0.2)["groups_solved_by_all"] == 0.5
    parts = episode(4, sum([0.1] * 10))  # a little below 1, by rounding
    assert episode_metrics([parts], passing=1.0)["groups_solved_by_all"] == 1.0
    assert "groups_equal" not in episode_metrics(episodes[:1], 1.0), "one is equal to itself"


def test_lengths_are_compared_within_a_task() -> None:
    """The hard task is long in any case, so it says nothing about who should become shorter."""
    easy = [episode(0, 1.0, 10), episode(0, 0.0, 30)]
    hard = [episode(1, 0.0, 500), episode(1, 0.0, 700)]
    found = episode_metrics([*easy, *hard], 1.0)
    assert (found["length_better"], found["length_worse"]) == (10, 30)
    assert "length_better" not in episode_metrics(hard, 1.0)
    assert episode_metrics([], 1.0) == {}


QUARTERS = st.integers(-8, 8).map(lambda number: number / 4)


@given(st.lists(st.builds(episode, st.integers(0, 3), QUARTERS, st.integers(1, 99), st.booleans())))
def test_shares_are_shares_and_lengths_lie_between_the_shortest_and_the_longest(
    episodes: list[TrainedEpisode],
) -> None:
    found = dict(episode_metrics(episodes, 1.0))
    lengths = [found.pop(name) for name in ("length_better", "length_worse") if name in found]
    assert len(lengths) in (0, 2), "above and below a mean there is always somebody"
    sizes = [one.tokens for one in episodes]
    assert all(min(sizes) <= length <= max(sizes) for length in lengths)
    found.pop("groups", None)
    assert all(0 <= share <= 1 for share in found.values())


def test_what_the_trainer_dropped_or_the_policy_did_not_sample_does_not_count() -> None:
    batch = batch_of([2, 3, 4])
    shown = batch.samples[2].model_copy(update={"oldest_version": -1})
    batch = batch.model_copy(update={"samples": (*batch.samples[:2], shown)})
    events = [recorded(n, n + 2).model_copy(update={"reward": 1.0}) for n in range(3)]
    assert [one.tokens for one in trained_episodes(batch, events, {0, 2})] == [2]
    no_reward = [one.model_copy(update={"reward": None}) for one in events]
    assert not trained_episodes(batch, no_reward, {0, 1, 2})


@pytest.mark.parametrize(
    ("one", "cut"),
    [
        (trajectory(turn([1], [2, 3], finish="length")), True),
        (trajectory(turn([1], [2], finish="length")), False),
        (trajectory(turn([1], [2], finish="stop")), False),
        (trajectory(turn([1], [2], finish="stop")).model_copy(update={"ending": "overflow"}), True),
        (
            trajectory(turn([1], [2, 3], finish="length"), turn([3], [4], parent=0, finish="stop")),
            False,  # the answer that was cut was continued
        ),
        (
            trajectory(turn([1], [2]), turn([1], [2, 3], policy="user", finish="length")),
            False,  # what another policy said was cut
        ),
    ],
)
def test_an_episode_is_cut_by_a_limit_or_in_its_last_answer(
    one: TrajectoryRecorded, cut: bool
) -> None:
    assert was_cut(one, "p") is cut


def test_dropped_groups_are_counted_once_for_each_reason() -> None:
    dropped = (
        Dropped(task=1, reason="stale"),
        Dropped(task=2, sample=0, reason="stale"),
        Dropped(task=2, sample=3, reason="stale"),
        Dropped(task=3, reason="zero_advantage"),
        Dropped(task=4, reason="evaluate"),
    )
    found = drops(batch_of([1], dropped=dropped))
    assert found == {"dropped_groups_stale": 2.0, "dropped_groups_zero_advantage": 1.0}
    many = tuple(Dropped(task=n, reason=f"reason_{n}") for n in range(99))
    assert len(drops(batch_of([1], dropped=many))) == MOST_REASONS

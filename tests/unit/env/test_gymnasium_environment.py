"""The Gymnasium adapter: worlds by seed, renders, actions that are none, wrong options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import gymnasium
import pytest

from headrace.errors import UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.gymnasium_environment import (
    POSITIONS,
    GymnasiumEnvironment,
    frozen_lake_position,
    random_frozen_lake,
    value,
)

MOVES = {"L": 0, "D": 1, "R": 2, "U": 3}
FIXED = {"map_name": "4x4", "is_slippery": False}
FIXED_HOLES = "FHLM"
WAY = "DDRRDR"
"""To the goal of the fixed map."""


def task(seed: int, sample: int = 0) -> TaskView:
    return TaskView(number=0, sample=sample, payload={}, options={}, seed=seed)


def lake(**options: Any) -> GymnasiumEnvironment:
    """FrozenLake without threads; `options` go over those of the fixed map."""
    given = {"kwargs": FIXED, "render": "frozen_lake_holes", "blocking": False, **options}
    return GymnasiumEnvironment("FrozenLake-v1", MOVES, **given)


def random_lake(**options: Any) -> GymnasiumEnvironment:
    return lake(kwargs={"is_slippery": False}, seeded="random_frozen_lake", **options)


def play(environment: GymnasiumEnvironment, seed: int, actions: str) -> list[Observation]:
    """The answers to a reset and to actions of one letter each; then closes."""

    async def main() -> list[Observation]:
        answers = [await environment.reset(task(seed))]
        answers += [await environment.step(action) for action in actions]
        await environment.aclose()
        return answers

    return asyncio.run(main())


@pytest.mark.parametrize("blocking", [True, False])
def test_the_goal_is_rewarded(blocking: bool) -> None:
    answers = play(lake(blocking=blocking), 0, WAY)

    assert [answer.text for answer in answers] == [FIXED_HOLES + "a", *"eijkop"]
    assert [answer.reward for answer in answers] == [None, 0, 0, 0, 0, 0, 1]
    assert [answer.done for answer in answers] == [False] * 6 + [True]


def test_a_hole_ends_without_reward() -> None:
    last = play(lake(), 0, "RD")[-1]

    assert (last.text, last.reward, last.terminated) == ("f", 0.0, True)


def test_the_environments_own_limit_truncates() -> None:
    last = play(lake(kwargs={**FIXED, "max_episode_steps": 2}), 0, "LL")[-1]

    assert last.truncated
    assert not last.terminated


def test_white_space_around_an_action_is_dropped() -> None:
    async def main() -> Observation:
        environment = lake()
        await environment.reset(task(0))
        return await environment.step(" D\n")

    assert asyncio.run(main()).text == "e"


def test_an_action_that_is_none_is_the_policys_doing() -> None:
    async def main() -> Observation:
        environment = lake(invalid_reward=-0.5)
        await environment.reset(task(0))
        return await environment.step("x" * 1000)

    answer = asyncio.run(main())

    assert (answer.reward, answer.terminated) == (-0.5, True)
    assert "actions are L, D, R, U" in answer.text
    assert len(answer.text) < 100


def test_the_position_alone() -> None:
    answers = play(lake(render="frozen_lake_position"), 0, "DD")

    assert [answer.text for answer in answers] == ["a", "e", "i"]


def test_positions_of_the_largest_map_differ_and_beyond_them_it_says_so() -> None:
    assert len({frozen_lake_position(None, cell, True) for cell in range(64)}) == 64
    assert POSITIONS.isascii()
    with pytest.raises(UsageError, match="cell 64 has no letter"):
        frozen_lake_position(None, 64, True)


def test_holes_have_letters_up_to_5x5_and_beyond_it_says_so() -> None:
    wide = {"is_slippery": False, "desc": ["SF" + "H" * 11, "F" * 12 + "G"]}
    assert play(lake(kwargs=wide), 0, "")[0].text == "CDEFGHIJKLM" + "a"
    with pytest.raises(UsageError, match="64 cells has more than the alphabet's letters"):
        play(lake(kwargs={"map_name": "8x8"}), 0, "")


def test_the_value_is_json() -> None:
    cart = gymnasium.make("CartPole-v1")
    observation, _ = cart.reset(seed=0)

    assert json.loads(value(cart, observation, True)) == pytest.approx(observation.tolist())
    assert value(cart, {"cards": (14, 10), "hit": observation[0] < 9}, True) == (
        '{"cards": [14, 10], "hit": true}'
    )
    assert value(cart, "as it is", True) == "as it is"
    with pytest.raises(UsageError, match="can't write a object"):
        value(cart, object(), True)


def test_all_samples_of_a_task_meet_the_same_world() -> None:
    worlds = [play(random_lake(), 7, "DR") for _ in range(3)]

    assert worlds[0] == worlds[1] == worlds[2]


def test_each_seed_is_a_world_of_its_own() -> None:
    worlds = {play(random_lake(), seed, "")[0].text for seed in range(50)}

    assert len(worlds) > 40
    assert all(set(world) <= set("BCDEFGHIJKLMNO") | {"a"} and world[-1] == "a" for world in worlds)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, -1])
def test_any_seed_of_a_task_will_do(seed: int) -> None:
    assert play(random_lake(), seed, "") == play(random_lake(), seed, "")


def test_a_pooled_one_is_made_anew_at_each_reset() -> None:
    async def main() -> list[str]:
        environment = random_lake()
        texts = [(await environment.reset(task(seed))).text for seed in (1, 2, 1)]
        await environment.step("D")
        texts.append((await environment.reset(task(2))).text)
        await environment.aclose()
        return texts

    pooled = asyncio.run(main())

    assert pooled == [play(random_lake(), seed, "")[0].text for seed in (1, 2, 1, 2)]


def test_a_slippery_world_is_rebuilt_by_its_actions() -> None:
    def options() -> Mapping[str, Any]:
        slippery = {"map_name": "8x8", "is_slippery": True}
        return {"kwargs": slippery, "render": "frozen_lake_position"}

    first = play(lake(**options()), 3, "RRDDRR")

    assert play(lake(**options()), 3, "RRDDRR") == first
    assert any(play(lake(**options()), seed, "RRDDRR") != first for seed in range(4, 10))


def test_a_function_of_ones_own_makes_the_world() -> None:
    environment = lake(seeded=f"{__name__}:frozen_all_over", render=f"{__name__}:shouted")

    assert play(environment, 5, "")[0].text == "5!"


def frozen_all_over(seed: int) -> Mapping[str, Any]:
    """A Seeded: its one row is as long as the seed says, from the start to a goal."""
    return {"desc": ["S" + "F" * (seed - 2) + "G"]}


def shouted(environment: Any, observation: Any, first: bool) -> str:
    """A Render: how long the map is."""
    return f"{environment.unwrapped.desc.size}!"


def test_a_random_map_follows_from_its_seed_alone() -> None:
    rows = random_frozen_lake(3)["desc"]

    assert [len(row) for row in rows] == [4] * 4
    assert random_frozen_lake(3) == random_frozen_lake(3)


@pytest.mark.parametrize(
    ("id", "message"),
    [("Nowhere-v1", "Nowhere"), ("FrozenLake-v99", "v99"), ("two words", "Malformed")],
)
def test_an_unknown_id_is_refused_at_once(id: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GymnasiumEnvironment(id, MOVES)


@pytest.mark.parametrize(
    ("id", "actions", "kwargs", "message"),
    [
        ("FrozenLake-v1", MOVES, {"nap_name": "4x4"}, "nap_name"),
        ("FrozenLake-v1", MOVES, {"map_name": "9x9"}, "KeyError: '9x9'"),
        ("no_such_module:Lake-v1", MOVES, {}, "no_such_module"),
        ("FrozenLake-v1", {"jump": 4}, {}, r"'jump' is 4, which is not in Discrete\(4\)"),
        ("Pendulum-v1", {"push": 1}, {}, "which is not in Box.* of Pendulum-v1"),
    ],
)
def test_what_cant_be_made_says_why(
    id: str, actions: Mapping[str, int], kwargs: Mapping[str, Any], message: str
) -> None:
    environment = GymnasiumEnvironment(id, actions, kwargs, blocking=False)

    with pytest.raises(UsageError, match=message):
        play(environment, 0, "")


@pytest.mark.parametrize("option", ["render", "seeded"])
def test_an_unknown_name_says_which_there_are(option: str) -> None:
    with pytest.raises(UsageError, match=rf"no {option} 'frosen'\. Use .*frozen_lake"):
        lake(**{option: "frosen"})


def test_closing_one_that_was_never_reset_is_no_error() -> None:
    asyncio.run(lake().aclose())

"""Past versions as opponents: which ones, in which tasks, and what a recipe can't say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.task_settings import League
from headrace.services.tasks.league import LABEL, LeagueTasks, Opponents
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics

ROLES = {"first": "player", "second": "player", "referee": "referee"}


def recipe(purpose: str = "train", **league: Any) -> Recipe:
    tasks = {"roles": ROLES, "purpose": purpose, "league": {"roles": ["second"]} | league}
    policies = {
        "player": {"model": "tiny-llama", "training": {}},
        "referee": {"model": "tiny-llama", "training": None},
    }
    return Recipe.model_validate({"name": "a", "tasks": tasks, "policies": policies})


@given(
    st.lists(st.integers(0, 200), unique=True, min_size=1), st.integers(1, 30), st.integers(1, 5)
)
def test_an_opponent_is_one_of_the_newest_of_each_block(
    published: list[int], every: int, past: int
) -> None:
    opponents = Opponents(League(roles=("second",), every=every, past=past), seed=3)
    for version in [*sorted(published), *published]:
        opponents.on_published(version)
    firsts: dict[int, int] = {}
    for version in sorted(published):
        firsts.setdefault(version // every, version)
    assert opponents.versions == list(firsts.values())
    for newest in opponents.versions:
        drawn = opponents.drawn(newest)
        at = opponents.versions.index(newest)
        assert drawn in opponents.versions[max(0, at + 1 - past) : at + 1]
        assert drawn == opponents.drawn(newest)


def test_all_of_the_past_versions_play() -> None:
    opponents = Opponents(League(roles=("second",), every=1, past=4), seed=0)
    for version in range(2000):
        opponents.on_published(version)
    ages = [newest - opponents.drawn(newest) for newest in range(3, 2000)]
    assert all(ages.count(age) > 400 for age in range(4))


def test_tasks_get_the_opponent_of_the_versions_that_the_log_has() -> None:
    async def main() -> None:
        settings = recipe(every=10, past=2, share=0.75)
        assert settings.tasks.league is not None
        context = a_context(MemoryBroker(), "space", settings, Path())
        await make_topics(context.log)
        for version in range(12):
            await context.log.send(published("player", version))
        await context.log.send(published("referee", 0))
        league = LeagueTasks(settings, settings.tasks.league)
        following = asyncio.ensure_future(league.follow(context.log))
        maker = TaskMaker(settings, "source")
        async with asyncio.timeout(BOUND_S):
            tasks = [
                await league.with_opponents(maker.make(Item("a"), str(number), labels={"x": "y"}))
                for number in range(400)
            ]
        following.cancel()
        drawn = Opponents(settings.tasks.league, settings.tasks.seed)
        drawn.on_published(0)
        drawn.on_published(10)
        against_past = 0
        for task in tasks:
            versions = {role: use.version for role, use in task.roles.items()}
            if LABEL + "player" in task.labels:
                against_past += 1
                assert task.labels == {"x": "y", LABEL + "player": "10"}
                assert versions == {"first": None, "second": drawn.drawn(10), "referee": None}
            else:
                assert task.labels == {"x": "y"}
                assert set(versions.values()) == {None}
        assert 0.65 < against_past / len(tasks) < 0.85

    asyncio.run(main())


def test_a_task_waits_until_there_is_an_opponent() -> None:
    async def main() -> None:
        settings = recipe()
        assert settings.tasks.league is not None
        context = a_context(MemoryBroker(), "space", settings, Path())
        await make_topics(context.log)
        league = LeagueTasks(settings, settings.tasks.league)
        following = asyncio.ensure_future(league.follow(context.log))
        made = TaskMaker(settings, "source").make(Item("a"), "0-0")
        waiting = asyncio.ensure_future(league.with_opponents(made))
        await context.log.send(published("referee", 0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await context.log.send(published("player", 0))
        async with asyncio.timeout(BOUND_S):
            assert (await waiting).roles["second"].version == 0
        following.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"roles": []}, "at least 1 item"),
        ({"roles": ["third"]}, "no role 'third' among first, referee, second"),
        ({"roles": ["referee"]}, "'referee', which plays 'referee', has `training"),
        ({"roles": ["first", "second"]}, "past versions play every role of 'player'"),
        ({"purpose": "evaluate"}, "makes no versions"),
    ],
)
def test_a_league_in_which_nothing_would_learn_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        recipe(**changes)


def published(policy: str, version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy,
        version=version,
        status="trained" if version else "initial",
        digest=bytes(32),
        full_version=version,
    )

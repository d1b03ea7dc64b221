"""Settings that would delete needed records are found, and the message says how to repair them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import RETENTION_MS, Topics
from headrace.services.namespace.apply import topic_configuration
from headrace.services.namespace.retention import (
    check_recipe,
    needed_ms,
    repairing,
    require_kept,
    shortcomings,
)

DAY = 86_400_000
TOPICS = Topics("x", ("a", "b"), 2)


def recipe(deadline_s: int = 300) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "x",
            "tasks": {"deadline_s": deadline_s, "roles": {"policy": "a"}},
            "policies": {"a": {"model": "tiny-llama"}, "b": {"model": "tiny-llama"}},
        }
    )


def settings(**changes: dict[str, str]) -> dict[str, dict[str, str]]:
    """All topics as `apply` makes them, but for changes by short name (`_` for `.` and `-`)."""
    made = {one.name: topic_configuration(one.topic) for one in TOPICS}
    for short, change in changes.items():
        made[f"x.{short.replace('__', '.')}.v1"].update(change)
    return made


def found(**changes: dict[str, str]) -> list[tuple[str, str, str]]:
    wrong = shortcomings(TOPICS, recipe(), settings(**changes))
    return [(one.topic, one.setting, one.needs) for one in wrong]


def test_what_apply_makes_suffices() -> None:
    assert found() == []
    check_recipe(recipe())


def test_topics_that_are_not_there_yet_are_not_judged() -> None:
    assert shortcomings(TOPICS, recipe(), {}) == []


@pytest.mark.parametrize(
    ("topic", "setting", "has", "needs"),
    [
        ("runs", "retention.ms", str(90 * DAY), "-1"),
        ("episodes", "retention.ms", str(DAY), str(DAY + 300_000)),
        ("policies", "retention.ms", str(DAY), str(8 * DAY + 300_000)),
        ("policies", "cleanup.policy", "compact", "delete"),
        ("tasks", "cleanup.policy", "compact,delete", "delete"),
        ("prompts__a", "retention.bytes", "1000000", "-1"),
        ("items__a", "cleanup.policy", "delete", "compact"),
        ("items__a", "retention.ms", str(90 * DAY), "-1"),
        # Long enough by itself, but batches refer to it for longer.
        ("trajectories", "retention.ms", str(30 * DAY), str(90 * DAY)),
        ("batches__b", "retention.ms", "-1", "-1"),
    ],
)
def test_each_shortcoming_is_found(topic: str, setting: str, has: str, needs: str) -> None:
    name = "trajectories" if topic == "batches__b" else topic  # they are what must be kept longer
    expected = [(f"x.{name.replace('__', '.')}.v1", setting, needs)]
    assert found(**{topic: {setting: has}}) == expected


def test_what_a_cluster_defaults_to_counts() -> None:
    wrong = shortcomings(TOPICS, recipe(), {"x.runs.v1": {}, "x.episodes.v1": {}})
    assert [(one.topic, one.has) for one in wrong] == [("x.runs.v1", str(7 * DAY))]


def test_the_message_says_setting_value_need_and_repair() -> None:
    wrong = {"retention.ms": "3600000", "cleanup.policy": "compact"}
    with pytest.raises(UsageError) as raised:
        require_kept(TOPICS, recipe(), settings(trajectories=wrong))
    message = str(raised.value)
    assert (
        "x.trajectories.v1: retention.ms is 3600000 (0.0417 days), and must be at least" in message
    )
    assert (
        "--entity-name x.trajectories.v1 --add-config cleanup.policy=delete,retention.ms="
        in message
    )


def test_a_recipe_whose_episodes_outlive_their_events_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tasks\.deadline_s is 604800.*7 days"):
        check_recipe(recipe(7 * 86_400))


ages = st.sampled_from(["-1", "1000", str(DAY), str(9 * DAY), str(90 * DAY), str(365 * DAY)])


@given(st.dictionaries(st.sampled_from([one.name for one in TOPICS]), ages))
def test_the_named_repair_repairs(changes: dict[str, str]) -> None:
    made = settings()
    for name, age in changes.items():
        made[name]["retention.ms"] = age
    for one in shortcomings(TOPICS, recipe(), made):
        made[one.topic][one.setting] = one.needs
    assert shortcomings(TOPICS, recipe(), made) == []


def test_every_class_of_topics_needs_less_than_it_is_given() -> None:
    for kept, given_ms in RETENTION_MS.items():
        assert needed_ms(kept, recipe()) <= given_ms
    assert repairing([]) == []

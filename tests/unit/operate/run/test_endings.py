"""What people are told of how episodes end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import EpisodeEnded, Failure, TaskEnded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.run.endings import HOPELESS, MOST_KINDS, Endings

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})


def ended(task: int, *episodes: dict[str, Any]) -> TaskEnded:
    outcomes = tuple(
        EpisodeEnded.model_validate(
            {"task": task, "sample": n, "item_id": "i", "ending": "finished", **episode}
        )
        for n, episode in enumerate(episodes)
    )
    return TaskEnded(
        task=task, source="s", task_id="t", item_id="i", closed_by="all", outcomes=outcomes
    )


def failed(message: str, code: str = "environment_error") -> dict[str, Any]:
    return {
        "ending": "failed",
        "failure": Failure(origin="environment", code=code, message=message),
    }


def folded(
    *results: TaskEnded, since: float = 0.0, at: float = 1.0, recipe: Recipe = RECIPE
) -> Endings:
    endings = Endings(recipe, since)
    for result in results:
        endings.on_task_ended(result, at)
    return endings


def test_failures_that_differ_in_numbers_only_are_one_kind() -> None:
    endings = folded(
        *(ended(n, failed(f"KeyError: item {n}"), failed("TypeError: 'idd'")) for n in range(50)),
        ended(50, failed("KeyError: item 50\nsecond line"), {"reward": 1.0}),
    )
    first, second, third = map(str, endings.top())
    assert first == "50 times environment_error: KeyError: item 0; headrace show 0/0"
    assert second == "50 times environment_error: TypeError: 'idd'; headrace show 0/1"
    assert third.startswith(
        "1 times environment_error: KeyError: item 50 second line; headrace show 50"
    )


def test_the_kinds_of_failures_are_bounded() -> None:
    names = ("".join(chr(97 + int(digit)) for digit in str(n)) for n in range(3 * MOST_KINDS))
    endings = folded(ended(0, *(failed(name) for name in names)))
    assert len(endings.top(10**6)) == MOST_KINDS + 1
    assert endings.top()[0].count == 2 * MOST_KINDS
    assert len(str(folded(ended(0, failed("x" * 10_000))).top()[0])) < 300


def test_a_kind_is_news_at_each_power_of_ten() -> None:
    endings = Endings(RECIPE, 0.0)
    seen = []
    for number in range(120):
        endings.on_task_ended(ended(number, failed("no")), 1.0)
        seen += [(number + 1, line) for line in endings.news()]
    assert [count for count, _ in seen] == [1, 10, 100]
    assert seen[1][1] == "failed: 10 times environment_error: no; headrace show 0/0"


def test_a_command_stops_only_if_all_its_episodes_fail_in_one_way() -> None:
    same = [ended(n, failed("no")) for n in range(HOPELESS)]
    reason = folded(*same).hopeless()
    assert reason is not None
    assert reason.startswith(
        f"all of the first {HOPELESS} episodes failed in the same way: {HOPELESS}"
    )
    assert folded(*same[1:]).hopeless() is None, "too few"
    assert folded(*same, ended(99, {"reward": 0.0})).hopeless() is None
    assert folded(*same, ended(99, failed("another"))).hopeless() is None
    assert folded(*same, since=2.0).hopeless() is None, "an earlier command's"
    cancelled = {"ending": "cancelled", "failure": None}
    assert folded(*same, ended(99, cancelled)).hopeless() is not None


@pytest.mark.parametrize(
    ("episodes", "hint"),
    [
        ([{"ending": "deadline"}, {"reward": 1.0}], "reach their deadline: raise tasks.deadline_s"),
        ([{"ending": "turn_limit", "reward": 0.0}, {"reward": 1.0}], "reach tasks.max_turns"),
        ([{"ending": "overflow", "reward": 0.0}, {"reward": 1.0}], "run out of tokens"),
        ([{"reward": 0.0}, {"reward": 0.0}], "every reward is 0: nothing can be learned"),
        ([failed("no")], "no episode has a reward"),
        ([{"reward": 0.0}, {"reward": 1.0}], None),
    ],
)
def test_hints(episodes: list[dict[str, Any]], hint: str | None) -> None:
    hints = folded(*(ended(n, *episodes) for n in range(256))).hints()
    assert any(hint in one for one in hints) if hint else not hints
    assert not folded(*(ended(n, *episodes) for n in range(20))).hints()


def test_tasks_whose_rewards_do_not_differ_teach_nothing() -> None:
    constant = [ended(n, {"reward": n % 2}, {"reward": n % 2}) for n in range(256)]
    (hint,) = folded(*constant).hints()
    assert hint.startswith("within each task all rewards are equal")
    assert not folded(*constant, ended(256, {"reward": 0}, {"reward": 1})).hints()


def learning(**training: Any) -> Recipe:
    policies: dict[str, Any] = {
        "default": {"model": "tiny-llama", "training": training},
        "teacher": {"model": "tiny-llama", "training": False},
    }
    if "critic" in training:
        policies["default"]["groups"] = {"advantage": "rewards"}
    return Recipe.model_validate({"name": "r", "policies": policies})


def test_equal_rewards_teach_something_to_who_does_not_compare_them() -> None:
    by_task = [ended(n, {"reward": n % 2}, {"reward": n % 2}) for n in range(256)]
    constant = [ended(n, {"reward": 0.0}, {"reward": 0.0}) for n in range(256)]
    taught = learning(loss="distill", teacher="teacher")
    assert not folded(*by_task, recipe=taught).hints()
    assert not folded(*constant, recipe=taught).hints()
    assert folded(*[ended(n, failed("no")) for n in range(256)], recipe=taught).hints()
    judged = learning(critic={})
    assert not folded(*by_task, recipe=judged).hints()
    assert folded(*constant, recipe=judged).hints()

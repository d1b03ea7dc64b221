"""A question is shown, and its answer is graded by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.question_environment import QuestionEnvironment, exact, last_number

HERE = __name__


def half(answer: str, payload: Mapping[str, Any]) -> float:
    return 0.5 * float(answer == payload["answer"])


async def named(answer: str, payload: Mapping[str, Any]) -> Observation:
    await asyncio.sleep(0)
    return Observation(text="noted", reward=0.25, rewards={"form": 0.25})


def nothing(answer: str, payload: Mapping[str, Any]) -> Any:
    return None


def play(environment: QuestionEnvironment, action: str, **payload: Any) -> Observation:
    async def main() -> Observation:
        shown = await environment.reset(TaskView(0, 0, payload, {}, 0))
        assert not shown.done
        return await environment.step(action)

    return asyncio.run(main())


def mine(name: str) -> str:
    return f"{HERE}:{name}"


def test_it_shows_the_field_that_the_recipe_names() -> None:
    async def main(prompt: str) -> str:
        task = TaskView(0, 0, {"question": "6 * 7?", "problem": 8}, {}, 0)
        return (await QuestionEnvironment(prompt=prompt).reset(task)).text

    assert asyncio.run(main("question")) == "6 * 7?"
    assert asyncio.run(main("problem")) == "8"
    with pytest.raises(UsageError, match=r"no field 'text', only \['problem', 'question'\]"):
        asyncio.run(main("text"))


@pytest.mark.parametrize(
    ("grader", "action", "answer", "reward"),
    [
        ("exact", " 42\n", "42", 1.0),
        ("exact", "42", 42, 1.0),
        ("exact", "42.", "42", 0.0),
        ("last_number", "6 * 7 is 42.", "so it is #### 42", 1.0),
        ("last_number", "1,234.50 of 3", "1234.5", 0.0),
        ("last_number", "3 of 1,234.50", "1234.5", 1.0),
        ("last_number", "-5", "5", 0.0),
        ("last_number", "no idea", "5", 0.0),
        (mine("half"), "a", "a", 0.5),
        (mine("half"), "b", "a", 0.0),
    ],
)
def test_an_answer_is_graded(grader: str, action: str, answer: Any, reward: float) -> None:
    graded = play(QuestionEnvironment(grader), action, question="?", answer=answer)
    assert (graded.reward, graded.terminated) == (reward, True)


def test_a_grader_may_be_a_coroutine_and_name_parts_of_the_reward() -> None:
    graded = play(QuestionEnvironment(mine("named")), "a", question="?")
    assert (graded.reward, graded.rewards, graded.text) == (0.25, {"form": 0.25}, "noted")
    assert graded.terminated


@given(st.text())
def test_the_built_in_graders_take_every_answer(answer: str) -> None:
    assert exact(answer, {"answer": answer}) == 1.0
    assert last_number(answer, {"answer": "7"}) in (0.0, 1.0)


def test_what_cannot_grade_is_named() -> None:
    with pytest.raises(UsageError, match="no grader 'strict'"):
        QuestionEnvironment("strict")
    with pytest.raises(UsageError, match="returned None: it must return a number"):
        play(QuestionEnvironment(mine("nothing")), "a", question="?")
    with pytest.raises(UsageError, match=r"no field 'answer', only \['question'\]"):
        play(QuestionEnvironment(), "a", question="?")
    with pytest.raises(UsageError, match="has no number: 'none'"):
        play(QuestionEnvironment("last_number"), "a", question="?", answer="none")
    assert "grader" in QuestionEnvironment.recipe_only

"""`headrace.play_episode`: an episode from Python, for tests and notebooks."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from headrace import UsageError, play_episode


def test_an_episode_by_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    moves = iter("DDRDRR")
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return next(moves)

    outcome = play_episode("quickstart", answer)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("finished", 1.0, 1)
    assert len(prompts) == 6
    assert len(set(prompts)) > 1
    assert "-- the episode ended: finished, reward 1" in capsys.readouterr().out


def test_the_recipe_can_be_changed_and_limits_it() -> None:
    outcome = play_episode("quickstart", lambda prompt: "L", settings=["tasks.max_turns=2"])
    assert outcome.ending == "turn_limit"


def test_an_impossible_answer_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"the policy can't answer this: .* is not allowed"):
        play_episode("quickstart", lambda prompt: "X")


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        play_episode("quickstart", lambda prompt: str(1 // 0))


def test_it_works_where_a_loop_runs_already() -> None:
    async def notebook() -> float | None:
        return play_episode("null", lambda prompt: "a", item=3).reward

    assert asyncio.run(notebook()) is not None


def test_an_item_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match="--item 64: the data set 'count' has fewer items"):
        play_episode("null", lambda prompt: "a", item=64)


def test_it_imports_no_torch() -> None:
    script = (
        "import sys, headrace; headrace.play_episode('quickstart', lambda prompt: 'L');"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert shown.splitlines()[-1] == "False"

"""Libraries in their child process: real problems and games, and a library that misbehaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.types import Observation
from headrace.services.env.environment import Claim
from headrace.services.env.libraries.libraries_setup import LibrarySetup
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.tasks.data_sets import reasoning_gym
from tests.adapters.stage import Stage, recipe, view

CLAIM = Claim(task=1, sample=0, attempt=0, partition=0, offset=0, expires_at=0.0)
USE = EnvironmentUse(use="default")


ODD = "tests.adapters.odd:Odd"


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.libraries.libraries_setup.GRACE_S", 3.0)


def run(use: str, options: Mapping[str, Any], test: Any, *, within_s: float = 120.0) -> Any:
    async def main() -> Any:
        setup = LibrarySetup(use, options, EnvironmentSlots(8))
        try:
            await setup.open()
            return await asyncio.wait_for(test(setup), within_s)
        finally:
            await setup.close_pool()
            assert setup.process._process is None

    return asyncio.run(main())


async def play(setup: LibrarySetup, actions: list[str], **task: Any) -> list[Observation]:
    environment = await setup.take(USE, CLAIM)
    answers = [await environment.reset(view(**task))]
    answers += [await environment.step(action) for action in actions]
    await environment.aclose()
    return answers


def problem(index: int = 0, **config: Any) -> Mapping[str, Any]:
    options: dict[str, Any] = {
        "dataset": "count_bits",
        "size": 20,
        "seed": 3,
        "config": {"max_n": 31, **config},
    }
    return next(islice(reasoning_gym(**options), index, None)).payload


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "lacks .'dataset', 'index', 'seed'."),
    ({"dataset": "none", "seed": 0, "index": 0}, "data set 'none'"),
    ({"dataset": "gcd", "seed": 0, "index": 0, "config": {"max_value": 0}}, "max_value must"),
    ({"dataset": "gcd", "seed": 0, "index": 0, "config": {"x": 0}}, "unexpected keyword"),
)


def test_problems_are_asked_and_their_answers_scored() -> None:
    async def test(setup: LibrarySetup) -> None:
        asked = [(await play(setup, [], payload=problem(index)))[0].text for index in (4, 5, 4)]
        assert asked[0] == asked[2] != asked[1]
        right = str(int(asked[0].removesuffix("?!").rsplit(maxsplit=1)[-1]).bit_count())
        for action, reward in ((right, 1.0), ("9", 0.0), ("", 0.0)):
            first, last = await play(setup, [action], payload=problem(4))
            assert (first.text, first.done) == (asked[0], False)
            assert (last.reward, last.terminated) == (reward, True)
        unreadable = {"dataset": "number_sorting", "seed": 1, "index": 0}
        assert (await play(setup, ["[[[1"], payload=unreadable))[-1].reward == 0.0
        for payload, match in WRONG:
            with pytest.raises(UsageError, match=match):
                await play(setup, [], payload=payload)

    run("reasoning_gym", {"suffix": "!"}, test)


def test_an_answer_is_what_stands_in_the_last_of_its_tags() -> None:
    async def test(setup: LibrarySetup) -> None:
        (asked,) = await play(setup, [], payload=problem(4))
        right = int(asked.text.removesuffix("?").rsplit(maxsplit=1)[-1]).bit_count()
        for action, reward in (
            (f"9, or <answer>9</answer>. No:\n<answer> {right}\n</answer> it is", 1.0),
            (f"<answer>{right}</answer><answer>9</answer>", 0.0),
            (str(right), 0.0),
            (f"<answer>{right}", 0.0),
        ):
            _, last = await play(setup, [action], payload=problem(4))
            assert (last.reward, last.terminated) == (reward, True)

    run("reasoning_gym", {"answer_tag": "answer"}, test)


def test_a_hostile_answer_is_wrong_and_soon_scored() -> None:
    """It is the policy's fault: a failure would give the episode another attempt."""

    async def test(setup: LibrarySetup) -> None:
        for dataset, action, why in (
            ("count_bits", "<answer>" * 125_000, "no answer"),
            ("count_bits", f"<answer>{'9' * 1_000_000}</answer>", "1000000 characters"),
            ("polynomial_multiplication", f"<answer>{'(' * 19_000}</answer>", ""),
            ("polynomial_multiplication", f"<answer>{'-' * 19_000}x</answer>", ""),
        ):
            payload = {"dataset": dataset, "size": 5, "seed": 3, "config": {}, "index": 0}
            _, last = await play(setup, [action], payload=payload)
            assert (last.reward, last.terminated) == (0.0, True)
            assert why in last.data.get("unreadable", "")

    run("reasoning_gym", {"call_s": 5.0, "answer_tag": "answer"}, test)


def test_the_source_yields_the_same_problems_each_time() -> None:
    assert [item.item_id for item in reasoning_gym("gcd", 3, 7)] == [
        "gcd-7-0",
        "gcd-7-1",
        "gcd-7-2",
    ]
    assert list(reasoning_gym("gcd", 3)) == list(reasoning_gym("gcd", 3))
    with pytest.raises(UsageError, match="at least one problem"):
        list(reasoning_gym("gcd", 0))


def test_a_game_is_won_and_what_it_refuses_is_told() -> None:
    async def test(setup: LibrarySetup) -> None:
        environment = await setup.take(USE, CLAIM)
        too_early = "[2]" + " because" * 3_000  # a game reads the end of a long action
        answers = [await environment.reset(view(seed=4)), await environment.step(too_early)]
        assert "between 1 and 3" in answers[0].text
        assert "invalid move" in answers[1].text
        assert "between 1 and 3" not in answers[1].text
        for number in range(1, 4):
            last = await environment.step(f"[{number}]")
            if last.done:
                break
        assert (last.reward, last.terminated) == (1.0, True)
        await environment.aclose()

    options = {"id": "GuessTheNumber-v0", "kwargs": {"max_number": 3}}
    run("textarena", options, test)


def test_games_beside_each_other_have_chances_of_their_own() -> None:
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3

    async def test(setup: LibrarySetup) -> None:
        alone = [await play(setup, moves, seed=seed) for seed in (1, 2)]
        together = await asyncio.gather(*(play(setup, moves, seed=seed) for seed in (1, 2)))
        assert alone == together
        assert alone[0] != alone[1]

    run("textarena", {"id": "2048-v0"}, test)


@pytest.mark.parametrize(
    ("use", "options", "match"),
    [
        ("textarena", {"id": "NoGame-v0"}, "NoGame-v0"),
        ("textarena", {}, "required argument: 'id'"),
        ("reasoning_gym", {"sufix": "!"}, "sufix"),
        ("reasoning_gym", {"call_s": -1}, "call_s: Input should be greater"),
    ],
)
def test_wrong_options_are_an_error_before_the_worker_joins(
    use: str, options: Mapping[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        run(use, options, None)


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("sleep", "too_slow"),
        ("hang", "too_slow"),
        ("die", "library_died"),
        ("eat", "library_failed"),
        ("flood", "answer_too_large"),
        ("fail", "library_failed"),
    ],
)
@pytest.mark.usefixtures("short_grace")
def test_a_bad_call_is_its_own_failure_and_others_begin_anew(action: str, code: str) -> None:
    async def test(setup: LibrarySetup) -> None:
        one, other = await setup.take(USE, CLAIM), await setup.take(USE, CLAIM)
        await one.reset(view())
        await other.reset(view())
        with pytest.raises(EnvironmentFailed, match=code):
            await one.step(action)
        if action in ("sleep", "eat", "fail"):  # its process took it
            assert (await other.step("go")).text == "go"
        else:
            with pytest.raises(InfrastructureError, match="sandbox_lost"):
                await other.step("go")
        await one.aclose()
        assert (await play(setup, ["on"]))[-1].text == "on"

    run(ODD, {"call_s": 2.0, "answer_kb": 64}, test)


@pytest.mark.usefixtures("short_grace")
def test_a_call_that_is_given_up_leaves_no_answer_for_the_next() -> None:
    async def test(setup: LibrarySetup) -> None:
        one = await setup.take(USE, CLAIM)
        await one.reset(view())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.step("sleep"), 0.2)
        assert (await play(setup, ["mine"]))[-1].text == "mine"

    run(ODD, {"call_s": 30}, test)


@pytest.mark.usefixtures("short_grace")
def test_a_task_cannot_set_options() -> None:
    async def test(setup: LibrarySetup) -> None:
        with pytest.raises(UsageError, match="set them in the recipe"):
            await setup.take(EnvironmentUse(use="default", options='{"broken": true}'), CLAIM)

    run(ODD, {}, test)


def test_an_episode_through_the_worker_is_stepped_again_by_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"id": "GuessTheNumber-v0", "kwargs": {"max_number": 100}}
        async with Stage(recipe("textarena", options), tmp_path).played() as stage:
            assert "between 1 and 100" in (await stage.reset(seed=5)).text
            assert "target number is" in (await stage.step("[50]")).text
            await stage.stop()
            stage.start()
            again = await stage.step("[50]")
            assert again.failure is None
            assert "already guessed" in again.text

    asyncio.run(main())


KILLED = """
import asyncio, sys
sys.path.insert(0, {root!r})
from headrace.services.env.libraries.libraries_setup import LibrarySetup
from headrace.services.env.slots import EnvironmentSlots

async def main():
    made = LibrarySetup("tests.adapters.odd:Odd", {{}}, EnvironmentSlots(1))
    await made.open()
    print(made.process._process.pid, flush=True)
    await made.process.ask("step", None, name="x", action="hang")

asyncio.run(main())
"""


def test_the_child_dies_with_a_worker_that_is_killed() -> None:
    root = str(Path(__file__).parents[2])
    script = KILLED.format(root=root)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    child.wait(60)
    assert not child.is_running()

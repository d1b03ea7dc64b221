"""The rules for environments: good ones keep them, and each fault breaks one by its name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, ClassVar

import pytest

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.operate.conformance.environment.check_environment import check_environment

pytestmark = pytest.mark.slow

ACTIONS = [str(number) for number in range(1, 6)]


class GoodWorld:
    """Find a number from 1 to 5. It can be closed at any time."""

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        self.number = Random(task.seed).randint(2, 5)
        self.over = False
        return Observation(text=f"1 to 5? {Random(task.seed).random()}")

    async def step(self, action: str) -> Observation:
        if self.over:
            return Observation(text="over", terminated=True)
        self.over = action.strip() == str(self.number)
        return Observation(text=action[:20], reward=float(self.over), terminated=self.over)

    async def aclose(self) -> None:
        pass


class Survivor(GoodWorld):
    """It can be resumed, and is a judge."""

    kept: ClassVar[dict[str, tuple[int, bool]]] = {}

    def set_name(self, name: str) -> None:
        self.name = name

    async def resume(self, task: TaskView, done: int) -> None:
        if self.name not in self.kept:
            raise InfrastructureError("sandbox_lost")
        self.number, self.over = self.kept[self.name]

    async def release(self) -> None:
        self.kept[self.name] = self.number, self.over

    async def score(self, payload: Any) -> Observation:
        return Observation(reward=float(len(payload["answer"])))


class Counted(Survivor):
    """It can't be released. It notes its names, and which instances are open."""

    names: ClassVar[list[str]] = []
    live: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.live.add(id(self))

    def set_name(self, name: str) -> None:
        self.names.append(name)
        super().set_name(name)

    async def release(self) -> None:
        raise OSError("not now")

    async def aclose(self) -> None:
        self.live.discard(id(self))


class CountedOnce(GoodWorld):
    """It can't be resumed."""

    live: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.live.add(id(self))

    async def aclose(self) -> None:
        self.live.discard(id(self))


class NoCloser:
    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        return Observation()

    async def step(self, action: str) -> Observation:
        return Observation()


class ReturnsText(GoodWorld):
    async def step(self, action: str) -> Any:
        return "a text"


class Raises(GoodWorld):
    async def step(self, action: str) -> Observation:
        raise KeyError(action)


class InfiniteReward(GoodWorld):
    async def step(self, action: str) -> Observation:
        return Observation(reward=float("nan"))


class Hangs(GoodWorld):
    async def step(self, action: str) -> Observation:
        await asyncio.sleep(3600)
        raise AssertionError


class OnlyNumbers(GoodWorld):
    async def step(self, action: str) -> Observation:
        int(action)
        return await super().step(action)


class Huge(GoodWorld):
    async def step(self, action: str) -> Observation:
        return Observation(text="x" * 20_000_000, terminated=True)


class IgnoresTheSeed(GoodWorld):
    async def step(self, action: str) -> Observation:
        return Observation(text=str(Random().random()))


class WorldOfTheSample(GoodWorld):
    async def reset(self, task: TaskView) -> Observation:
        await super().reset(task)
        return Observation(text=f"sample {task.sample}")


class SharedState(GoodWorld):
    said: ClassVar[list[str]] = []

    async def reset(self, task: TaskView) -> Observation:
        self.said.clear()
        return await super().reset(task)

    async def step(self, action: str) -> Observation:
        self.said.append(action)
        await asyncio.sleep(0)
        found = await super().step(action)
        return Observation(text="".join(self.said), terminated=found.terminated)


class SharedWorld(GoodWorld):
    """The newest reset makes the world of all instances."""

    world: ClassVar[dict[str, int]] = {}

    async def reset(self, task: TaskView) -> Observation:
        self.world["seed"] = task.seed
        return await super().reset(task)

    async def step(self, action: str) -> Observation:
        drawn = Random(self.world["seed"]).random()
        return Observation(text=f"{drawn}", terminated=action == "3")


class ResetOnce(GoodWorld):
    async def reset(self, task: TaskView) -> Observation:
        again = hasattr(self, "number")
        await super().reset(task)
        return Observation(text=f"reset before: {again}")


class Blocks(GoodWorld):
    async def step(self, action: str) -> Observation:
        time.sleep(0.6)
        return Observation(terminated=True)


class HangsAfterTheEnd(GoodWorld):
    async def step(self, action: str) -> Observation:
        if self.over:
            await asyncio.sleep(3600)
        return await super().step(action)


class RaisesAfterTheEnd(GoodWorld):
    """It may do so."""

    async def step(self, action: str) -> Observation:
        if self.over:
            raise RuntimeError("the episode is over")
        return await super().step(action)


class NeverMind(GoodWorld):
    """A cancelled step goes on."""

    async def step(self, action: str) -> Observation:
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
        return Observation()


class ClosesWhatIsThere(GoodWorld):
    async def aclose(self) -> None:
        del self.number


class ClosesSlowly(GoodWorld):
    async def aclose(self) -> None:
        await asyncio.sleep(30)


class LosesItsState(Survivor):
    async def resume(self, task: TaskView, done: int) -> None:
        await super().resume(task, done)
        self.number = 6


class ResumesAnything(Survivor):
    async def resume(self, task: TaskView, done: int) -> None:
        self.number, self.over = 3, False


class LeavesAProcess(GoodWorld):
    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    async def reset(self, task: TaskView) -> Observation:
        self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]))
        return await super().reset(task)


class LeavesATask(GoodWorld):
    left: ClassVar[list[Any]] = []

    async def reset(self, task: TaskView) -> Observation:
        self.left.append(asyncio.create_task(asyncio.sleep(3600)))
        return await super().reset(task)


class ScoresNothing(Survivor):
    async def score(self, payload: Any) -> Observation:
        return Observation()


class Exits(GoodWorld):
    async def step(self, action: str) -> Observation:
        sys.exit(1)


FAULTS: list[tuple[Callable[..., Any], str, str]] = [
    (NoCloser, "starts", "it has no method aclose"),
    (ReturnsText, "returns_observations", "returned a str"),
    (Raises, "returns_observations", "step 1 ('1') raised KeyError"),
    (InfiniteReward, "returns_observations", "not finite"),
    (Hangs, "returns_observations", "did not return within 1 s"),
    (Exits, "returns_observations", "SystemExit"),
    (OnlyNumbers, "takes_any_action", "step ('') raised ValueError"),
    (Huge, "observations_fit_a_record", "that of step 1 has 20000"),
    (IgnoresTheSeed, "a_seed_repeats", "differ at step 1"),
    (WorldOfTheSample, "samples_share_the_world", "differ at the reset"),
    (SharedState, "episodes_are_apart", "one beside another differ"),
    (SharedWorld, "episodes_are_apart", "one beside another differ"),
    (ResetOnce, "can_be_reset", "differ at the reset"),
    (Blocks, "blocks_no_loop", "blocked the asyncio loop for"),
    (HangsAfterTheEnd, "a_step_after_the_end_returns", "did not return within 1 s"),
    (NeverMind, "a_cancelled_call_ends", "step went on for 2 s"),
    (ClosesWhatIsThere, "closes_at_any_time", "aclose raised AttributeError"),
    (ClosesSlowly, "closes_at_any_time", "aclose did not return within 2 s"),
    (LosesItsState, "resumes", "a whole and a resumed episode differ"),
    (ResumesAnything, "refuses_to_resume_what_is_gone", "returned"),
    (LeavesAProcess, "leaves_nothing", "the process"),
    (LeavesATask, "leaves_nothing", "the asyncio task"),
    (ScoresNothing, "scores_are_finite", "no reward"),
]


def check(made: Callable[..., Any], **changes: Any) -> Any:
    given = {"actions": ACTIONS, "persistent": True, "score": {"answer": "42"}, **changes}
    return check_environment(f"{made.__module__}:{made.__name__}", {}, **given)


@pytest.mark.parametrize("made", [GoodWorld, Survivor, RaisesAfterTheEnd])
def test_a_good_environment_keeps_all_rules(made: Callable[..., Any]) -> None:
    report = check(made)
    assert report.failed == (), "\n".join(report.lines())
    unchecked = {one.rule for one in report.findings if one.verdict == "not checked"}
    resumable = {"resumes", "refuses_to_resume_what_is_gone", "scores_are_finite"}
    assert unchecked == (set() if made is Survivor else resumable)


@pytest.mark.parametrize(("made", "rule", "says"), FAULTS, ids=[one[0].__name__ for one in FAULTS])
def test_a_fault_breaks_its_rule(made: Callable[..., Any], rule: str, says: str) -> None:
    report = check(made, rules=[rule], call_s=1.0)
    for process in LeavesAProcess.left:
        process.kill()
        process.wait()
    assert report.failed == (rule,)
    assert says in report.findings[0].happened


@pytest.mark.parametrize(("made", "verdict"), [(Counted, "fail"), (CountedOnce, "not checked")])
def test_what_is_not_released_is_closed(made: Any, verdict: str) -> None:
    [found] = check(made, rules=["resumes"]).findings
    assert found.verdict == verdict
    assert not made.live


def test_each_run_has_its_own_names() -> None:
    runs = []
    for _ in range(2):
        Counted.names.clear()
        check(Counted, rules=["resumes"])
        runs.append(set(Counted.names))
    assert all(runs)
    assert not runs[0] & runs[1]


def test_each_rule_has_a_fault() -> None:
    names = {one.rule for one in check(GoodWorld).findings}
    assert names == {rule for _, rule, _ in FAULTS}


def test_what_can_not_be_made_fails_once() -> None:
    report = check_environment(f"{__name__}:GoodWorld", {"size": 3})
    assert report.failed == ("starts",)
    assert "takes no arguments" in report.findings[0].happened
    assert {one.verdict for one in report.findings[1:]} == {"not checked"}


@pytest.mark.parametrize("use", ["null", "question"])
def test_built_in_environments_keep_the_rules(use: str) -> None:
    payload = {"question": "a?", "answer": "a"}
    report = check_environment(use, {}, payload=payload, actions=["a"])
    assert report.failed == (), "\n".join(report.lines())


def test_what_can_not_be_tried_is_refused() -> None:
    with pytest.raises(UsageError, match="no rule 'speed'"):
        check(GoodWorld, rules=["speed"])
    with pytest.raises(UsageError, match="no environment 'speed'"):
        check_environment("speed", {})

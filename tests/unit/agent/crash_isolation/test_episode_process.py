"""A real child process: episodes run in it as in a worker, and its death is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from headrace.errors import HeadraceError, TooLarge
from headrace.schemas.events import EpisodeEnded, Event, Ref, TrajectoryRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.crash_isolation.episode_process import EpisodesProcess
from headrace.services.agent.crash_isolation.isolation import IsolatedEpisode
from tests.unit.agent.crash_isolation.test_isolation import Context
from tests.unit.agent.test_episode_run import World, start, task


def recipe(use: str = "tests.unit.agent.crash_isolation.killers:killer") -> Recipe:
    policies = {"default": {"model": "tiny-llama"}}
    agents = {"default": {"use": use}}
    return Recipe.model_validate({"name": "test", "policies": policies, "agents": agents})


class Log(Context):
    """Answers what each episode asks, as a policy and an environment would."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.isolated_episodes: dict[int, IsolatedEpisode] = {}

    async def send(self, event: Event) -> Ref:
        await super().send(event)
        answer = self.world.answer(event)
        if answer is not None:
            self.isolated_episodes[answer.sample].on_answer(answer)
        return Ref(topic="t", partition=0, offset=len(self.sent), digest=bytes(16))

    def isolated(self, sample: int, how: str) -> None:
        started = start(task(payload=json.dumps({"how": how}), attempts=1))
        started = started.model_copy(update={"sample": sample})
        isolated = IsolatedEpisode(self, started, 0.0, {}, self.send)  # type: ignore[arg-type]
        self.isolated_episodes[sample] = isolated

    def ended(self) -> dict[int, EpisodeEnded]:
        return {one.sample: one for one in self.sent if isinstance(one, EpisodeEnded)}


def run_child(
    log: Log, *hows: str, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> str | None:
    """Runs an episode for each way to play in a child. How that died."""

    async def main() -> tuple[str | None, int]:
        for sample, how in enumerate(hows):
            log.isolated(sample, how)
        child = await EpisodesProcess.start(recipe())
        try:
            running = asyncio.create_task(child.run(list(log.isolated_episodes.values())))
            if meanwhile is not None:
                await meanwhile()
            return await asyncio.wait_for(running, 20), child._process.pid
        finally:
            await child.aclose()

    death, pid = asyncio.run(main())
    assert not psutil.pid_exists(pid)
    return death


def test_episodes_run_in_a_child_as_in_a_worker() -> None:
    log = Log()
    assert run_child(log, "", "", "") is None
    assert all(isolated.ended for isolated in log.isolated_episodes.values())
    for sample, outcome in log.ended().items():
        assert (outcome.ending, outcome.reward) == ("finished", 0.0)
        ref = outcome.trajectory
        assert ref is not None
        trajectory = log.sent[ref.offset - 1]
        assert isinstance(trajectory, TrajectoryRecorded)
        assert (trajectory.sample, len(trajectory.turns)) == (sample, 1)
    assert len(log.ended()) == 3


@pytest.mark.parametrize(
    ("how", "told"), [("exit", "exit code 7"), ("kill", "SIGKILL"), ("close", "")]
)
def test_a_child_s_death_is_told_and_takes_nobody_with_it(how: str, told: str) -> None:
    log = Log()
    death = run_child(log, how)
    assert death is not None
    assert told in death
    assert log.ended() == {}


def test_what_exits_politely_fails_alone_and_what_waits_can_be_cancelled_and_stopped() -> None:
    log = Log()

    async def meanwhile() -> None:
        while len(log.ended()) < 1:
            await asyncio.sleep(0.01)
        log.isolated_episodes[1].cancel("enough")
        while len(log.ended()) < 2:
            await asyncio.sleep(0.01)
        log.isolated_episodes[2].stop()

    assert run_child(log, "sys.exit", "wait", "wait", meanwhile=meanwhile) is None
    endings = {sample: outcome.ending for sample, outcome in log.ended().items()}
    assert endings == {0: "failed", 1: "cancelled"}


def test_an_event_that_no_record_can_hold_fails_its_episode() -> None:
    class Narrow(Log):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, TrajectoryRecorded):
                raise TooLarge("9,000,000 bytes")
            return await super().send(event)

    log = Narrow()
    run_child(log, "")
    failure = log.ended()[0].failure
    assert failure is not None
    assert failure.code == "too_large"


def test_a_child_that_does_not_come_up_is_an_error(capfd: Any) -> None:
    async def main() -> None:
        with pytest.raises(HeadraceError, match="did not come up"):
            await EpisodesProcess.start(recipe("tests.unit.agent.killers:nothing"))

    asyncio.run(main())
    assert "nothing" in capfd.readouterr().err

"""Black-box programs as agents: what they say, what they cost, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import UsageError
from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    TrajectoryRecorded,
)
from headrace.services.agent.episode import Episode
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.gateway.program import Command
from tests.unit.agent.test_episode_run import World, end, task

BOUND_S = 60.0
TALKING = Path(__file__).with_name("talking.py")


class Chatting(World):
    """Answers chats: the new messages are tokens, and each answer names its call."""

    def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
        found = super().answer(event)
        if isinstance(event, GenerationRequested) and isinstance(found, GenerationCompleted):
            added = packed.pack_i32(list(event.chat.encode()))
            return found.model_copy(update={"prompt_added": added, "text": f"answer {event.call}"})
        return found

    def trajectory(self) -> TrajectoryRecorded:
        (found,) = self.of(TrajectoryRecorded)
        assert isinstance(found, TrajectoryRecorded)
        return found


class Forking(Command):
    """Gets ready before its episode, as in an agent worker, and ends after it."""

    async def __call__(self, episode: Episode) -> None:
        await self.open(60)
        try:
            await super().__call__(episode)
        finally:
            await self.aclose()


FORKS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="no forks here")),
]


def play(how: str, world: Chatting | None = None, **changes: Any) -> EpisodeEnded:
    payload = json.dumps({"how": how, **changes.pop("payload", {})})
    kind = Forking if changes.pop("forks", False) else Command
    agent = kind([sys.executable, str(TALKING)], **changes.pop("options", {}))
    meanwhile = changes.pop("meanwhile", None)
    answers = changes.pop("answers", None)
    left_s = changes.pop("left_s", 60.0)
    submitted = task(environment=None, payload=payload, **changes)
    return end(
        world or Chatting(),
        submitted,
        agent,
        meanwhile=meanwhile,
        answers=answers,
        left_s=left_s,
        bound_s=BOUND_S,
    )


def alive(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.cmdline():
                found.append(process)
    return found


def gone(mark: str) -> bool:
    """Whether they end by themselves."""
    return not psutil.wait_procs(alive(mark), timeout=BOUND_S)[1] and not alive(mark)


@pytest.mark.parametrize("forks", FORKS)
def test_a_program_s_calls_are_turns_of_one_context(forks: bool) -> None:
    world = Chatting()
    outcome = play("talk", world, forks=forks)
    assert (outcome.ending, outcome.reward, outcome.rewards) == ("finished", 0.5, {"form": 1.0})
    first, second = world.of(GenerationRequested)
    turns = world.trajectory().turns
    assert [turn.parent for turn in turns] == [-1, 0]
    assert all(turn.trainable for turn in turns)
    # What was said is carried on as it was, and only what is new is told.
    assert second.tokens == turns[0].context + turns[0].tokens
    assert json.loads(first.chat)["messages"] == [{"role": "user", "content": "hello"}]
    assert json.loads(second.chat)["messages"] == [{"role": "user", "content": "more"}]


def test_a_program_that_fails_is_tried_again_and_never_rewarded() -> None:
    world = Chatting()
    outcome = play("fail", world, attempts=2)
    assert (outcome.ending, outcome.attempts, outcome.reward) == ("failed", 2, None)
    assert outcome.failure is not None
    assert outcome.failure.origin == "agent"
    assert "nothing works here" in outcome.failure.message


def test_a_program_that_is_not_there_fails_its_episode() -> None:
    outcome = end(
        Chatting(),
        task(environment=None, attempts=1),
        Command(["no-such-program"]),
        bound_s=BOUND_S,
    )
    assert outcome.failure is not None
    assert "can't run no-such-program" in outcome.failure.message


def test_a_limit_of_the_task_ends_program_and_episode() -> None:
    world = Chatting()
    outcome = play("endless", world, max_turns=3)
    assert (outcome.ending, outcome.attempts) == ("turn_limit", 1)
    assert len(world.trajectory().turns) == 3
    outcome = play("endless", max_tokens=4)
    assert outcome.ending == "token_limit"


def test_who_has_no_token_is_nobody() -> None:
    assert play("stranger").reward == 402


@pytest.mark.parametrize("forks", FORKS)
def test_a_program_gets_only_the_variables_that_the_recipe_lists(
    monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA_PROPERTIES", "sasl.password=x")
    monkeypatch.setenv("A_CLOUDS_TOKEN", "x")
    monkeypatch.setenv("LISTED_TOKEN", "x")
    assert play("secrets", forks=forks, options={"inherit": ["LISTED_TOKEN"]}).reward == 0


def test_only_the_report_key_sets_a_reward() -> None:
    assert play("report").reward == len("HEADRACE_REPORT_KEY")


def test_a_report_with_too_many_names_fails_the_attempt() -> None:
    outcome = play("names", attempts=1)
    assert (outcome.ending, outcome.reward, outcome.rewards) == ("failed", None, {})
    assert outcome.failure is not None
    assert "1000 names; at most 256" in outcome.failure.message


def test_a_program_gets_the_keys_of_the_payload_that_the_recipe_names() -> None:
    given = {"prompt": "why?", "answer": "because"}
    assert play("show", payload=given).reward == 3
    assert play("show", payload=given, options={"payload": ["how", "prompt"]}).reward == 2


def test_a_flood_of_output_harms_nobody() -> None:
    assert play("flood").reward == 1


def test_a_judge_s_word_stands_over_the_program_s_own() -> None:
    world = Chatting()
    world.observed = lambda action: {"reward": 0.25, "terminated": False}
    assert play("talk", world, options={"judge": "grader"}).reward == 0.25
    (asked,) = world.of(ActionRequested)
    assert (asked.kind, asked.environment.use) == ("score", "grader")
    assert "noise" in json.loads(asked.payload)["output"]


@pytest.mark.parametrize("forks", FORKS)
def test_all_that_a_program_began_ends_with_it(forks: bool) -> None:
    mark = uuid.uuid4().hex
    outcome = play("leave children", payload={"mark": mark}, forks=forks)
    assert outcome.ending == "finished"
    assert gone(mark)


def test_all_that_a_program_began_ends_at_the_deadline_and_with_a_cancellation() -> None:
    for left_s, cancel, ending in ((1.5, False, "deadline"), (60.0, True, "cancelled")):
        mark, world = uuid.uuid4().hex, Chatting()

        async def meanwhile(
            run: EpisodeRun, world: Chatting = world, cancel: bool = cancel
        ) -> None:
            async with asyncio.timeout(BOUND_S):
                while cancel and not world.of(GenerationRequested):
                    await asyncio.sleep(0.02)
            if cancel:
                run.cancel("not wanted")

        outcome = play(
            "leave children", world, payload={"mark": mark, "stay": True},
            left_s=left_s, meanwhile=meanwhile,
        )  # fmt: skip
        assert outcome.ending == ending
        assert gone(mark)


@pytest.mark.parametrize("forks", FORKS)
def test_kill_9_of_the_worker_leaves_no_child(tmp_path: Path, forks: bool) -> None:
    mark = uuid.uuid4().hex
    worker = (
        "import asyncio, sys\n"
        "from headrace.services.agent.gateway.program_process import running\n"
        "from headrace.services.processes.program_starter import ProgramStarter\n"
        "async def main():\n"
        "    program = ProgramStarter(sys.argv[1:], None)\n"
        f"    if {forks}: program.open()\n"
        "    async with running(program, {}, b''):\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    family = tmp_path / "family.py"
    family.write_text(
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "subprocess.Popen(command)\n"
        "time.sleep(600)\n"
    )

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", worker, sys.executable, str(family), mark),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with asyncio.timeout(BOUND_S):
                # The worker, the guard, the program, and its two children. The fork server has a
                # guard, too.
                while len(alive(mark)) < (7 if forks else 5):
                    await asyncio.sleep(0.02)
            process.kill()
            await process.wait()
            assert gone(mark)
        finally:
            for one in alive(mark):
                one.kill()

    asyncio.run(main())


def test_an_episode_whose_worker_was_lost_begins_a_new_attempt() -> None:
    world = Chatting()
    recorded = {0: {"1": None}}  # whatever the answer was: it is not played again
    outcome = play("talk", world, answers=recorded)
    assert (outcome.ending, outcome.attempt) == ("finished", 1)
    assert [one.attempt for one in world.of(GenerationRequested)] == [1, 1]
    assert [one.code for one in world.trajectory().failures] == ["worker_lost"]


def test_an_engine_on_another_host_runs_no_contained_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    agent = Command(["a"], judge="j", container={"image": "i"})
    with pytest.raises(UsageError, match=r"must be on this host.*192\.0\.2\.1"):
        asyncio.run(agent.open(60))


@pytest.mark.parametrize(
    "options",
    [
        {"command": "python agent.py"},
        {"command": []},
        {"command": ["a"], "tool_calls": "x"},
        {"command": ["a"], "payload": "prompt"},
        {"command": ["a"], "inherit": "HOME"},
        {"command": ["a"], "inherit": ["HOME"], "judge": "j", "container": {"image": "x"}},
        {"command": ["a"], "container": {"image": "x"}},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Command(**options)

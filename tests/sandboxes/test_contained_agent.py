"""A black-box agent in a container: it reaches the gateway, nothing else, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
)
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.gateway.container import FOLDER
from headrace.services.agent.gateway.program import Command
from headrace.services.processes.docker.docker_engine import DockerEngine
from tests.sandboxes import contained
from tests.sandboxes.docker_engine import IMAGE
from tests.unit.agent.gateway.test_program import Chatting
from tests.unit.agent.test_episode_run import end, task

PROGRAM = Path(__file__).with_name("contained.py").read_text()
CONTAINER = {"image": IMAGE, "relay_image": IMAGE}
BOUND_S = 120.0


@pytest.fixture(autouse=True)
def docker(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)
    monkeypatch.setenv("HEADRACE_SECRET", "of the worker alone")


class Judging(Chatting):
    """Rewards a program that ends well."""

    def __init__(self) -> None:
        super().__init__()
        self.observed = lambda action: {
            "reward": float(json.loads(action.payload)["exit_code"] == 0),
            "terminated": False,
        }


def play(how: str, world: Chatting | None = None, **changes: Any) -> EpisodeEnded:
    options = {
        "container": CONTAINER,
        "judge": "grader",
        "payload": ["how", "port"],
        **changes.pop("options", {}),
    }
    changes.setdefault("attempts", 1)
    agent = Command(["python3", "-c", PROGRAM], **options)
    meanwhile = changes.pop("meanwhile", None)
    payload = json.dumps({"how": how, "port": changes.pop("port", 1), "answer": "forty-two"})
    submitted = task(environment=None, payload=payload, **changes)
    return end(
        world or Chatting(), submitted, agent, meanwhile=meanwhile, left_s=100.0, bound_s=BOUND_S
    )


async def containers() -> list[str]:
    engine = DockerEngine()
    try:
        found = await engine.containers({"headrace.agent": "command"})
        return [one["Names"][0] for one in found]
    finally:
        await engine.aclose()


async def all_gone() -> None:
    async with asyncio.timeout(BOUND_S):
        while await containers():
            await asyncio.sleep(0.1)


def test_it_plays_through_the_gateway_and_finds_nothing_else() -> None:
    world = Chatting()
    world.observed = lambda action: {"reward": 0.25, "terminated": False}
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = play("talk", world, port=server.getsockname()[1])
    assert (outcome.ending, outcome.reward, outcome.rewards) == ("finished", 0.25, {"grader": 0.25})
    (judged,) = world.of(ActionRequested)
    told = json.loads(json.loads(judged.payload)["output"])
    assert (told["said"], told["found"]) == ("answer 1", [])
    assert json.loads(judged.payload)["task"]["answer"] == "forty-two"
    assert len(world.of(GenerationRequested)) == 1
    asyncio.run(all_gone())


def test_a_failure_before_the_policy_spoke_is_reported_and_tried_again() -> None:
    outcome = play("fail early", attempts=2)
    assert outcome.failure is not None
    assert "exited with 3: nothing works here" in outcome.failure.message
    assert (outcome.ending, outcome.attempts, outcome.reward) == ("failed", 2, None)
    asyncio.run(all_gone())


def test_a_failure_after_the_policy_spoke_is_scored() -> None:
    world = Judging()
    outcome = play("fail", world, attempts=2)
    assert (outcome.ending, outcome.attempts, outcome.reward) == ("finished", 1, 0.0)
    (judged,) = world.of(ActionRequested)
    assert json.loads(judged.payload)["exit_code"] == 3
    assert world.trajectory().metrics == {"exit_code": 3.0}


@pytest.mark.parametrize("how", contained.HARMS)
def test_what_the_policy_s_code_does_is_scored_and_never_tried_again(how: str) -> None:
    world = Judging()
    outcome = play(how, world, attempts=3, options={"timeout_s": 6.0 if how == "stop" else 45.0})
    assert outcome.failure is None
    assert (outcome.ending, outcome.attempts) == ("finished", 1)
    (judged,) = world.of(ActionRequested)
    code = json.loads(judged.payload)["exit_code"]
    assert outcome.reward == float(code == 0)
    unharmed = ("kill the others", "fill its folders", "leave daemons", "flood the relay")
    assert (code == 0) == (how in unharmed)
    asyncio.run(all_gone())


def test_a_request_that_can_t_be_served_is_scored_once_the_policy_spoke() -> None:
    class Refusing(Judging):
        def answer(self, event: Event) -> Any:
            found = super().answer(event)
            if isinstance(event, GenerationRequested) and "refuse" in event.chat:
                assert isinstance(found, GenerationCompleted)
                failure = Failure(origin="operator", code="bad_tokens", message="no such role")
                return found.model_copy(update={"failure": failure, "finish": "failed"})
            return found

    world = Refusing()
    outcome = play("ask what can't be served", world, attempts=3)
    assert (outcome.ending, outcome.attempts, outcome.failure) == ("finished", 1, None)
    assert len(world.of(ActionRequested)) == 1


def test_an_image_that_is_not_there_fails_the_attempt_and_says_so() -> None:
    outcome = play("talk", options={"container": {**CONTAINER, "image": "no-such-image"}})
    assert outcome.failure is not None
    assert "no-such-image" in outcome.failure.message
    with pytest.raises(UsageError, match="container"):
        Command(["x"], container={"image": "x", "network": "host"})


def test_it_is_gone_once_its_episode_is_cancelled() -> None:
    world = Chatting()

    async def cancel(run: EpisodeRun) -> None:
        async with asyncio.timeout(BOUND_S):
            while not world.of(GenerationRequested):
                await asyncio.sleep(0.05)
        assert len(await containers()) == 2
        run.cancel("enough")

    assert play("linger", world, meanwhile=cancel).ending == "cancelled"
    asyncio.run(all_gone())


def _linger(asked: Any) -> None:
    class Telling(Chatting):
        def answer(self, event: Any) -> Any:
            if isinstance(event, GenerationRequested):
                asked.set()
            return super().answer(event)

    play("linger", Telling())


def test_it_is_gone_once_its_worker_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not pytest's folder: a socket's path has at most 108 characters.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        _kill_a_worker()
        (left,) = Path(folder).iterdir()
        assert left.name.startswith(FOLDER)
        assert play("talk").ending == "finished"
        assert list(Path(folder).iterdir()) == []


def _kill_a_worker() -> None:
    context = multiprocessing.get_context("fork")
    asked = context.Event()
    worker = context.Process(target=_linger, args=(asked,))
    worker.start()
    assert asked.wait(BOUND_S)
    assert worker.pid is not None
    assert len(asyncio.run(containers())) == 2
    os.kill(worker.pid, 9)
    worker.join(BOUND_S)
    asyncio.run(all_gone())

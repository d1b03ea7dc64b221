"""Environments that answer or fail in ways that no record can hold: the env worker goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import Event, ObservationRecorded, Ref
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import failure_of
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.shard import EnvShard
from headrace.services.env.slots import EnvironmentSlots
from tests.unit.env.test_shard import Bench, Counter, Lived, ResumableBench, action, resumable, run

LONE = "\ud83d"
"""Half of an emoji, which UTF-8 can't encode."""


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> None:
    """pytest-xdist can't send half a character, which tracebacks show."""
    caplog.set_level(logging.CRITICAL)


class Unreadable(Exception):
    """Has no message."""

    def __str__(self) -> str:
        raise AttributeError("no message")


class Incomplete(InfrastructureError):
    """Has no code: its base class was not initialized."""

    def __init__(self) -> None:
        pass


class Odd(Counter):
    """Returns or raises what the test wants."""

    outcome: Any = None

    async def step(self, action: str) -> Observation:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome if self.outcome is not None else Observation(text=f"You: {action}")

    async def score(self, payload: Any) -> Observation:
        return await self.step("score")

    async def aclose(self) -> None:
        if isinstance(self.outcome, BaseException):
            raise self.outcome


def answer_of(outcome: Any, kind: str = "step") -> ObservationRecorded:
    """The answer to an action whose environment returns or raises `outcome`, as bytes hold it."""
    codec, answers = Codec(), []
    codec.register(ObservationRecorded, 1)

    async def test(bench: Bench) -> None:
        keep = bench.context.send

        async def send(event: Event) -> Ref:
            codec.encode(event)
            return await keep(event)

        bench.context.send = send  # type: ignore[method-assign]
        make = type("Made", (Odd,), {"outcome": outcome})
        setup = EnvironmentSetup(make, {}, EnvironmentSlots(2))
        bench.shard = EnvShard(bench.context, {"default": setup}, "me")  # type: ignore[arg-type]
        await bench.live()
        payload = json.dumps({"action": LONE})
        if kind == "step":
            await bench.feed(action(0, "reset"))
        await bench.feed(action(int(kind == "step"), kind, payload=payload))
        answers.extend(await bench.context.answers(1 + int(kind == "step")))
        if kind == "step":
            await bench.feed(action(2, "close"))
        ended = await asyncio.gather(*bench.context.tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError | None) for one in ended)
        assert bench.context.held == set()

    run(test)
    return answers[-1]


def test_a_lone_surrogate_of_the_policy_comes_back_as_a_question_mark() -> None:
    answer = answer_of(None)
    assert (answer.text, answer.failure) == ("You: ?", None)


@pytest.mark.parametrize("name", [LONE, 1])
def test_a_name_of_a_reward_that_is_no_text_is_a_failure(name: Any) -> None:
    answer = answer_of(Observation(rewards={name: 1.0}))
    assert answer.failure is not None
    assert answer.failure.code == "bad_observation"
    assert "can't name a reward" in answer.failure.message


@pytest.mark.parametrize("kind", ["step", "score"])
@pytest.mark.parametrize(
    ("error", "origin", "code", "message"),
    [
        (ValueError(LONE), "environment", "environment_error", "ValueError: ?"),
        (EnvironmentFailed(LONE, LONE), "environment", "?", "?"),
        (UsageError(LONE), "operator", "unusable", "?"),
        (InfrastructureError(LONE, LONE), "infrastructure", "?", "?"),
        (InfrastructureError(5), "infrastructure", "5", ""),  # type: ignore[arg-type]
        (Unreadable(), "environment", "environment_error", "its message raises AttributeError"),
        (SystemExit(0), "environment", "environment_error", "SystemExit: 0"),
        (GeneratorExit(), "environment", "environment_error", "GeneratorExit"),
        (BaseException("own"), "environment", "environment_error", "BaseException: own"),
        (asyncio.CancelledError("elsewhere"), "environment", "environment_error", "elsewhere"),
    ],
)
def test_any_exception_is_answered_with_a_failure(
    error: BaseException, origin: str, code: str, message: str, kind: str
) -> None:
    failure = answer_of(error, kind).failure
    assert failure is not None
    assert (failure.origin, failure.code) == (origin, code)
    assert message in failure.message


def test_an_error_whose_class_was_not_initialized_is_the_environments_failure() -> None:
    failure = failure_of(Incomplete())
    assert (failure.origin, failure.code) == ("environment", "environment_error")


def test_an_environment_that_can_not_be_released_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def release(self: Lived) -> None:
        raise ConnectionResetError("the socket is closed already")

    async def test(bench: ResumableBench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"))
        await bench.context.answers(1)
        tasks = list(bench.context.tasks)
        await bench.end()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in ended if isinstance(one, Exception)]

    monkeypatch.setattr(Lived, "release", release)
    resumable(test)


@pytest.mark.parametrize("method", ["__init__", "resume"])
def test_a_system_exit_while_it_is_made_or_resumed_is_a_failure(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(self: Lived, **options: Any) -> None:
        raise SystemExit(3)

    async def leave_later(self: Lived, task: TaskView, done: int) -> None:
        raise SystemExit(3)

    async def test(bench: ResumableBench) -> None:
        await bench.feed(action(0, "reset"), action(1, after=bytes(16)))
        await bench.live()
        failure = (await bench.context.answers(1))[0].failure
        assert failure is not None
        assert failure.message == "SystemExit: 3"

    monkeypatch.setattr(Lived, method, leave if method == "__init__" else leave_later)
    resumable(test)

"""The example `tool_use`: its sums, what a real sandbox calculates, shows and rewards."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from examples.tool_use.calculator import sums, teacher
from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from tests.sandboxes.bench import bench, claim, view

TOOL = "examples.tool_use.calculator:Calculator"
SUM: dict[str, Any] = {"prompt": "7*8+5", "answer": 61, "steps": ["7*8", "+5"]}


class Lesson:
    """What an agent that demonstrates sees of an episode, on a real sandbox."""

    def __init__(self, environment: DockerEnvironment, payload: Any, careless: float) -> None:
        self.task = TaskView(1, 0, payload, {"careless": careless}, 0)
        self.random = Random(0)
        self.read: list[str] = []
        self.last = Observation()
        self._environment = environment

    async def generate(self, text: str, *, demonstration: str) -> SimpleNamespace:
        self.read += [text, demonstration]
        return SimpleNamespace(text=demonstration)

    async def reset(self) -> Observation:
        return await self._environment.reset(self.task)

    async def step(self, action: str) -> Observation:
        self.last = await self._environment.step(action)
        return self.last


def test_a_teacher_solves_sums_and_a_careless_one_does_not(engine: str) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"tool": TOOL, "tool_options": {"digits": 3}}
        async with asyncio.timeout(120), bench(engine, **options) as made:
            payloads = [SUM, *(item.payload for item in sums(size=2, numbers=4))]
            for number, payload in enumerate(payloads):
                for careless in (0.0, 1.0):
                    environment = await made.take(claim(number))
                    lesson = Lesson(environment, payload, careless)
                    await teacher(cast(Episode, lesson))
                    await environment.aclose()
                    assert lesson.last.terminated
                    assert lesson.last.reward == 1.0 - careless, lesson.read
                    if (number, careless) == (0, 0.0):
                        assert lesson.read == ["7*8+5\n", "7*8", " 56\n", " 56+5", " 61\n", " 61"]

    asyncio.run(main())


def test_what_has_no_value_is_an_error_and_harms_nobody(engine: str) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"tool": TOOL, "tool_options": {"digits": 8}}
        async with asyncio.timeout(120), bench(engine, command_s=2, **options) as made:
            environment = await made.fresh(prompt="2*3", answer=6)
            for expression in (
                "", "2*", "1/0", "9**99", "9**9**9", "open('x')", "__import__('os')",
                "[0]*10**10", "'a\\nb'", "\0", "\ud800", "6" * 19, "\uff16",
            ):  # fmt: skip
                shown = await environment.step(expression)
                assert (shown.text, shown.reward) == ("       E\n", None), expression
                assert not shown.done
            assert (await environment.step("(1.5+.5)*3-7")).text == "    -1.0\n"
            assert (await environment.step(" 06 ")).reward == 1.0
            assert (await environment.step("-6")).reward == 0.0

    asyncio.run(main())


def test_a_task_that_is_none_is_the_operators(engine: str) -> None:
    async def main() -> None:
        async with bench(engine, tool=TOOL) as made:
            environment = await made.take()
            with pytest.raises(UsageError, match="needs a payload of prompt and answer"):
                await environment.reset(view({"prompt": "x"}))

    asyncio.run(main())

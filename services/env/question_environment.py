"""The environment `question`: it shows one field of a task's payload, and grades one answer."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from headrace.errors import UsageError
from headrace.services.base.plugins import load
from headrace.services.base.types import Observation, TaskView

Payload = Mapping[str, Any]
Grade = float | Observation
Grader = Callable[[str, Payload], Grade | Awaitable[Grade]]
"""Maps the policy's answer and the task's payload to a reward, or to an Observation that has one.

It gets every answer, whatever the policy wrote. If it raises, the attempt fails and is retried.
"""

FIELD = "answer"
"""The field of the payload that the built-in graders compare with."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(answer: str, payload: Payload) -> float:
    """1 if the answer is `answer` of the payload, without the white space around both; else 0."""
    return float(answer.strip() == str(_expected(payload)).strip())


def last_number(answer: str, payload: Payload) -> float:
    """1 if the last number in the answer equals the last one in `answer` of the payload; else 0."""
    right = _last_number(str(_expected(payload)))
    if right is None:
        raise UsageError(f"the payload's {FIELD!r} has no number: {_expected(payload)!r}")
    return float(_last_number(answer) == right)


GRADERS: dict[str, Grader] = {"exact": exact, "last_number": last_number}
"""The built-in graders by name."""


class QuestionEnvironment:
    """Asks a question and grades one answer, by a function."""

    replayable = True
    recipe_only = frozenset({"grader"})

    def __init__(self, grader: str = "exact", prompt: str = "question") -> None:
        """Loads the grader. Raises UsageError if no grader has that name.

        Options:
            grader: `exact` gives 1 to an answer that equals the payload's `answer`, without the
                white space around it. `last_number` gives 1 if the last number in it does. Or the
                import path of a function of an answer and the payload that returns the reward. It
                may be a coroutine function, and may return an Observation with named rewards.
            prompt: The field of the payload that the agent sees.
        """
        self._grade: Grader = load("grader", grader, GRADERS)
        self._prompt = prompt
        self._payload: Payload = {}

    async def reset(self, task: TaskView) -> Observation:
        """Show the question."""
        if self._prompt not in task.payload:
            raise UsageError(
                f"the task's payload has no field {self._prompt!r}, only {sorted(task.payload)}: "
                "name the field to show in the option `prompt` of the environment"
            )
        self._payload = task.payload
        return Observation(text=str(task.payload[self._prompt]))

    async def step(self, action: str) -> Observation:
        """Grade the answer."""
        # A function that computes must not block the loop.
        if inspect.iscoroutinefunction(self._grade):
            graded: Any = await self._grade(action, self._payload)
        else:
            graded = await asyncio.to_thread(self._grade, action, self._payload)
        if isinstance(graded, Observation):
            return replace(graded, terminated=True)
        if not isinstance(graded, Real):
            raise UsageError(
                f"the grader returned {graded!r}: it must return a number or an Observation"
            )
        return Observation(reward=float(graded), terminated=True)

    async def aclose(self) -> None:
        """Do nothing: it holds nothing."""


def _expected(payload: Payload) -> Any:
    if FIELD not in payload:
        raise UsageError(
            f"the task's payload has no field {FIELD!r}, only {sorted(payload)}: write a grader "
            "that reads another one"
        )
    return payload[FIELD]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None

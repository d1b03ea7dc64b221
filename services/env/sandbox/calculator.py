"""A calculator that runs in the sandbox; the policy uses it to find the answer to a sum.

The correct answer never enters the sandbox: the worker compares it with the policy's answer.
"""

from __future__ import annotations

import re

from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
from headrace.services.env.sandbox.tools import reading_payload

EVALUATOR = "import sys; print(eval(sys.argv[1].strip(), {'__builtins__': {}}))"
"""This `eval` is not safe and need not be: the sandbox contains what an expression can do."""
OVERFLOW = "E"
"""The display shows this if the input is not an expression, has no value, or one too long."""
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,18})\s*", re.ASCII)


class Calculator:
    """An action is an expression, whose value is shown, or a single number, which is the answer.

    The task's payload has `prompt` and `answer`, an integer. The answer ends the episode; its
    reward is 1 if it is right, else 0. Every observation is one line.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, digits: int = 12) -> None:
        """`digits` is the width of the display; values are aligned to its right.

        Raises UsageError if the payload is not such a task.
        """
        self._sandbox = sandbox
        self._digits = digits
        with reading_payload(task, "calculator", "prompt and answer (an integer)"):
            self._prompt = str(task.payload["prompt"])
            self._answer = int(task.payload["answer"])

    async def prepare(self) -> Observation:
        """Return the prompt."""
        return Observation(text=f"{self._prompt}\n")

    async def act(self, action: str, index: int) -> Observation:
        """Show the value of an expression, or check the answer."""
        if answer := _NUMBER.fullmatch(action):
            right = int(answer[1]) == self._answer
            text = "right\n" if right else "wrong\n"
            return Observation(text=text, reward=float(right), terminated=True)
        shown = await self._calculate(action)
        return Observation(text=f"{shown:>{self._digits}}\n")

    async def _calculate(self, expression: str) -> str:
        try:
            result = await self._sandbox.run(("python3", "-I", "-c", EVALUATOR, expression))
        except BadArgument:
            return OVERFLOW
        shown = result.output.strip()
        fits = len(shown) <= self._digits and shown.isprintable()
        return shown if result.exit_code == 0 and shown and fits else OVERFLOW

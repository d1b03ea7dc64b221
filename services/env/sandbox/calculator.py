"""A calculator to reach an answer by: what it calculates, it calculates in the sandbox.

The answer itself never enters the sandbox: the worker compares it with what the policy says.
"""

from __future__ import annotations

import re

from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
from headrace.services.env.sandbox.tools import reading_payload

EVALUATOR = "import sys; print(eval(sys.argv[1].strip(), {'__builtins__': {}}))"
"""Not made safe: what an expression can do to Python, it does in the sandbox."""
OVERFLOW = "E"
"""What the display shows for what is no expression, has no value, or too long a one."""
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,18})\s*", re.ASCII)


class Calculator:
    """An action is an expression, and its value is shown; a number alone is the answer.

    The task's payload: `prompt`, and the `answer`, an integer. The reward is 1 where the number is
    the answer, else 0, and either ends the episode. Every text is a line.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, digits: int = 12) -> None:
        """`digits` are the display's places: values stand at its right, as a pocket calculator's.

        UsageError where the payload is no such task.
        """
        self._sandbox = sandbox
        self._digits = digits
        with reading_payload(task, "calculator", "prompt and answer (an integer)"):
            self._prompt = str(task.payload["prompt"])
            self._answer = int(task.payload["answer"])

    async def prepare(self) -> Observation:
        """Says what is to be calculated."""
        return Observation(text=f"{self._prompt}\n")

    async def act(self, action: str, index: int) -> Observation:
        """Calculates, or takes the answer."""
        if said := _NUMBER.fullmatch(action):
            right = int(said[1]) == self._answer
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

"""The calculator of the example `tool_use`, computed in Python instead of a container."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from examples.tool_use.calculator import Calculator
from headrace import Observation, Sandbox, TaskView


class PythonCalculator:
    """An environment. It is the sandbox of its own tool."""

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        """Returns the prompt."""
        self._tool = Calculator(cast("Sandbox", self), task, digits=3)
        return await self._tool.prepare()

    async def step(self, action: str) -> Observation:
        """Shows a value, or checks the answer."""
        return await self._tool.act(action, 0)

    async def aclose(self) -> None:
        """Holds nothing."""

    async def run(self, command: Sequence[str]) -> Any:
        """Computes the expression at the end of the command. A power is no expression here."""
        expression = command[-1].strip()
        if "**" in expression or not set(expression) <= set("0123456789+-* \n"):
            return SimpleNamespace(output="", exit_code=1)
        try:
            value = eval(expression, {"__builtins__": {}})
        except SyntaxError:
            return SimpleNamespace(output="", exit_code=1)
        return SimpleNamespace(output=f"{value}\n", exit_code=0)

"""What an action is in a sandbox: a shell command, a Python program, or a Tool of your own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from headrace.errors import UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.sandbox import BadArgument, Result, Sandbox


class Tool(Protocol):
    """Turns actions into commands in a sandbox, and their results into observations.

    Made as `Class(sandbox, task, **tool_options)`, again after its worker's death: it keeps nothing
    but what follows from the task and lies in the sandbox. Its code runs in the worker, and is
    trusted; what it runs by `sandbox.run` is not.
    """

    async def prepare(self) -> Observation:
        """The reset: the sandbox is fresh."""

    async def act(self, action: str, index: int) -> Observation:
        """Step `index`, from 1."""


@contextmanager
def reading_payload(task: TaskView, tool: str, needs: str) -> Iterator[None]:
    """UsageError where the task's payload, read within, is not what a tool needs."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"task {task.number}: tool {tool!r} needs a payload of {needs}: "
            f"{type(error).__name__}: {error}"
        ) from error


class Shell:
    """An action is a command of `sh`. Files in /workspace stay; variables and the folder don't.

    The first observation is the task's payload `prompt`. It never ends the episode, and gives no
    reward: an agent's own judgement or a limit of turns does.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, prompt: str = "") -> None:
        """`prompt` where the task has none."""
        self._sandbox = sandbox
        self._prompt = str(task.payload.get("prompt", prompt))

    async def prepare(self) -> Observation:
        """Says what the task is."""
        return Observation(text=self._prompt)

    async def act(self, action: str, index: int) -> Observation:
        """Runs the command."""
        try:
            return observation_of(await self._sandbox.run(self._command(action)))
        except BadArgument as error:
            return Observation(text=f"[not run: {error}]", data={"exit_code": None})

    def _command(self, action: str) -> tuple[str, ...]:
        return "sh", "-c", action


class Python(Shell):
    """An action is a Python program, run afresh: files in /workspace stay, variables don't."""

    def _command(self, action: str) -> tuple[str, ...]:
        return "python3", "-c", action


def observation_of(result: Result) -> Observation:
    """A command's output, and in brackets how it ended where that isn't plain success."""
    note = ""
    if result.ended:
        note = f"[ended: {result.ended}]"
    elif result.exit_code:
        note = f"[exit code {result.exit_code}]"
    text = result.output
    if note:
        text = f"{text.rstrip()}\n{note}" if text.strip() else note
    return Observation(text=text, data={"exit_code": result.exit_code, "ended": result.ended})

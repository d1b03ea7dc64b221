"""Tools decide what an action is in a sandbox: a shell command, a Python program, or your own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from headrace.errors import UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox


class Tool(Protocol):
    """Turns actions into commands in a sandbox, and their results into observations.

    It is made as `Class(sandbox, task, **tool_options)`, and again when another worker resumes the
    sandbox. So it keeps only state that follows from the task or is in the sandbox. Its own code
    runs in the worker and is trusted; what it runs with `sandbox.run` is not.
    """

    async def prepare(self) -> Observation:
        """Handle the reset: set up the fresh sandbox and return the first observation."""

    async def act(self, action: str, index: int) -> Observation:
        """Carry out step `index`, which counts from 1."""


@contextmanager
def reading_payload(task: TaskView, tool: str, needs: str) -> Iterator[None]:
    """Raise UsageError if the code inside fails because the task's payload is not what it needs."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"task {task.number}: tool {tool!r} needs a payload of {needs}: "
            f"{type(error).__name__}: {error}"
        ) from error


class Shell:
    """An action is a command of `sh`. Files in /workspace stay; variables and the folder don't.

    The first observation is the task's payload `prompt`. The tool never ends the episode and gives
    no reward: the agent or a limit of turns does.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, prompt: str = "") -> None:
        """Takes the sandbox of one episode.

        Options:
            prompt: The first observation of tasks whose payload has no `prompt`.
        """
        self._sandbox = sandbox
        self._prompt = str(task.payload.get("prompt", prompt))

    async def prepare(self) -> Observation:
        """Return the prompt."""
        return Observation(text=self._prompt)

    async def act(self, action: str, index: int) -> Observation:
        """Return the command's output. If it did not succeed, a line in brackets says why."""
        try:
            result = await self._sandbox.run(self._command(action))
        except BadArgument as error:
            return Observation(text=f"[not run: {error}]", data={"exit_code": None})
        text, note = result.output, ""
        if result.ended:
            note = f"[ended: {result.ended}]"
        elif result.exit_code:
            note = f"[exit code {result.exit_code}]"
        if note:
            text = f"{text.rstrip()}\n{note}" if text.strip() else note
        return Observation(text, {"exit_code": result.exit_code, "ended": result.ended})

    def _command(self, action: str) -> tuple[str, ...]:
        return "sh", "-c", action


class Python(Shell):
    """An action is a Python program in a new process: files in /workspace stay, variables don't."""

    def _command(self, action: str) -> tuple[str, ...]:
        return "python3", "-c", action

"""Small repositories with a fault: the policy repairs them by commands; hidden tests grade them.

As in `coding.py`, expected values never enter the sandbox. The tests call functions in a copy of
the repository as the policy left it, in a fresh sandbox.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.coding import Case, grade, ungraded
from headrace.services.env.sandbox.command_start import SandboxEnded
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
from headrace.services.env.sandbox.tools import Shell, reading_payload
from headrace.services.processes.docker.hardened import WORK

SUBMIT = "submit"
MOST_FILES = 256
CALLER = f"""
import importlib, sys
sys.path.insert(0, {WORK!r})
def call(name, arguments):
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*arguments)
"""
WRITER = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(sys.argv[2], encoding="utf-8")
"""
_FENCED = re.compile(r"```(?:sh|bash|shell)?[ \t]*\n(.*?)```", re.DOTALL)


class Repair(Shell):
    """An action is a command of `sh` in the task's repository; `submit` grades the repository.

    The task's payload has `prompt`, `files` (path to text) and `tests`, a list of
    ["module:function", arguments, expected value] as JSON. If an action has fenced blocks, the last
    one is the command; otherwise the whole action is. `submit` ends the episode, with reward 1 if
    all tests pass, else 0. A command that makes the sandbox useless ends it, too, with reward 0.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView) -> None:
        """Raises UsageError if the payload is not such a task."""
        super().__init__(sandbox, task)
        needs = (
            'prompt, files ({path: text}) and tests ([["module:function", arguments, value], …])'
        )
        with reading_payload(task, "repair", needs):
            self._files = {_path(name): str(text) for name, text in task.payload["files"].items()}
            self._tests: list[Case] = [
                ([str(name), list(arguments)], value)
                for name, arguments, value in task.payload["tests"]
            ]
            if not self._tests:
                raise ValueError("tests is empty, so every repository would pass")
            self._prompt = str(task.payload["prompt"])
        if len(self._files) > MOST_FILES:
            raise UsageError(f"task {task.number}: {len(self._files)} files; at most {MOST_FILES}")

    async def prepare(self) -> Observation:
        """Write the files and return the prompt."""
        for path, text in self._files.items():
            try:
                written = await self._sandbox.run(("python3", "-I", "-c", WRITER, path, text))
            except BadArgument as error:
                raise UsageError(f"the task's file {path}: {error}") from error
            if written.ended:  # The policy has not run anything yet, so the host was too slow.
                raise InfrastructureError(
                    "sandbox_slow", f"the task's file {path} was not written: {written.ended}"
                )
            if written.exit_code != 0:
                raise UsageError(f"the task's file {path} can't be written: {written.output}")
        listed = "\n".join(sorted(self._files))
        return Observation(
            text=f"{self._prompt}\n\nFiles in {WORK}:\n{listed}\n\n"
            f"Answer with one shell command at a time; with `{SUBMIT}` when it is repaired."
        )

    async def act(self, action: str, index: int) -> Observation:
        """Run the command, or grade the repository."""
        blocks = _FENCED.findall(action)
        command = blocks[-1] if blocks else action
        try:
            if command.strip() != SUBMIT:
                return await super().act(command, index)
            async with self._sandbox.fresh_copy() as fresh:
                graded = await grade(fresh, CALLER, "call", self._tests)
        except SandboxEnded as error:
            graded = ungraded(self._tests, str(error))
        return replace(graded, terminated=True)


def _path(name: Any) -> str:
    path = PurePosixPath(str(name))
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise ValueError(f"{name!r} is not a path within the repository")
    return str(path)

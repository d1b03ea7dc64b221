"""Programs graded by hidden tests: the sandbox computes the values, the worker compares them.

Expected values never enter the sandbox. So a program can't read them, and whatever it does to its
own process, to Python or to files, a wrong value stays wrong. Each program runs in a fresh sandbox,
whatever an earlier one left behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.services.base.json_text import load_json
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.command_start import SandboxEnded
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
from headrace.services.env.sandbox.tools import reading_payload

RESULT_KB = 256
"""Most of a run's output that is kept, in KiB. The results are its last line."""
RUNNER = """
import json, os, sys
results = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
program, entry, calls = sys.argv[1:4]
answers = []
try:
    names = {"__name__": "solution"}
    exec(compile(program, "solution", "exec"), names)
    function = names[entry]
except BaseException as error:
    answers = [["error", type(error).__name__]] * len(json.loads(calls))
else:
    for arguments in json.loads(calls):
        try:
            answers.append(["value", json.loads(json.dumps(function(*arguments)))])
        except BaseException as error:
            answers.append(["error", type(error).__name__])
results.write("\\n" + json.dumps(answers) + "\\n")
results.flush()
"""
PASSED = "passed"
Case = tuple[list[Any], Any]
"""The arguments of a call and the value that it must return; both are JSON values."""
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Coding:
    """An action is a program that defines a function. Its reward is 1 if it passes all tests.

    The task's payload has `prompt`, `entry` (the function's name) and `cases`, a list of
    [arguments, expected value] as JSON. If an action has fenced blocks, the last one is the
    program; otherwise the whole action is.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, tries: int = 1, partial: bool = False):
        """Raises UsageError if the payload is not such a task.

        Options:
            tries: Number of programs that an episode may submit.
            partial: Whether the reward of the last program is the share of tests that it passes.
        """
        self._sandbox = sandbox
        self._tries = tries
        self._partial = partial
        needs = "prompt, entry and cases ([[arguments, value], …])"
        with reading_payload(task, "coding", needs):
            self._prompt = str(task.payload["prompt"])
            self._entry = str(task.payload["entry"])
            self._cases = [(list(arguments), value) for arguments, value in task.payload["cases"]]
            if not self._cases:
                raise ValueError("cases is empty, so every program would pass")

    async def prepare(self) -> Observation:
        """Return the prompt."""
        return Observation(text=self._prompt)

    async def act(self, action: str, index: int) -> Observation:
        """Grade a program."""
        blocks = _FENCED.findall(action)
        program = blocks[-1] if blocks else action
        try:
            graded = await self._grade(program, index)
        except SandboxEnded as error:
            return replace(ungraded(self._cases, str(error)), terminated=True)
        over = graded.reward == 1.0 or index >= self._tries
        reward = graded.reward
        if over and self._partial:
            reward = graded.data["passed"] / max(1, graded.data["cases"])
        return replace(graded, reward=reward, terminated=over)

    async def _grade(self, program: str, index: int) -> Observation:
        if index == 1:  # nothing ran in the sandbox before
            return await grade(self._sandbox, program, self._entry, self._cases)
        async with self._sandbox.fresh_copy(files=False) as fresh:
            return await grade(fresh, program, self._entry, self._cases)


def ungraded(cases: Sequence[Case], why: str) -> Observation:
    """Return what a policy gets that kept its work from being graded: no test passed."""
    text = f"0 of {len(cases)} tests passed [ended: {why}]"
    return Observation(text=text, data={"passed": 0, "cases": len(cases)}, reward=0.0)


async def grade(sandbox: Sandbox, program: str, entry: str, cases: Sequence[Case]) -> Observation:
    """Call a program's function `entry` with the arguments of each case, and compare the values.

    The reward is 1 if all cases passed, else 0. `data` has the number of cases and of those that
    passed. If the run was ended, the text says why.
    """
    calls = json.dumps([arguments for arguments, _ in cases])
    command = ("python3", "-I", "-c", RUNNER, program, entry, calls)
    try:
        result = await sandbox.run(command, output_kb=RESULT_KB)
        results, why = _results(result.output), result.ended
    except BadArgument as error:
        results, why = [], str(error)
    answers = [*results, *[None] * len(cases)]
    verdicts = [_verdict(answers[number], value) for number, (_, value) in enumerate(cases)]
    passed = verdicts.count(PASSED)
    text = f"{passed} of {len(cases)} tests passed"
    if failed := sorted(set(verdicts) - {PASSED}):
        text += f": {', '.join(failed)}"
    if why:
        text += f" [ended: {why}]"
    data = {"passed": passed, "cases": len(cases)}
    return Observation(text=text, data=data, reward=float(passed == len(cases)))


def _results(output: str) -> list[Any]:
    """Read the runner's last line; return an empty list if the program prevented that line."""
    lines = output.rstrip().splitlines()
    try:
        results = load_json(lines[-1]) if lines else []
    except ValueError:
        return []
    return results if isinstance(results, list) else []


def _verdict(answer: Any, expected: Any) -> str:
    match answer:
        case ["value", value]:
            same = json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)
            return PASSED if same else "wrong value"
        case ["error", str(name)]:
            return name[:40]
    return "no answer"

"""Programs graded by tests: the sandbox computes, the worker compares.

What a test expects never enters the sandbox. So a program can't read it, and nothing that it does
to its own process, to Python or to the files there makes a wrong value right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.services.base.types import Observation, TaskView
from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
from headrace.services.env.sandbox.tools import reading_payload

RESULT_KB = 256
"""Most of a run's output that is kept: the results are its last line."""
RUNNER = """
import json, os, sys
results = os.fdopen(os.dup(1), "w")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
program, entry, calls = sys.argv[1:4]
said = []
try:
    names = {"__name__": "solution"}
    exec(compile(program, "solution", "exec"), names)
    function = names[entry]
except BaseException as error:
    said = [["error", type(error).__name__]] * len(json.loads(calls))
else:
    for arguments in json.loads(calls):
        try:
            said.append(["value", json.loads(json.dumps(function(*arguments)))])
        except BaseException as error:
            said.append(["error", type(error).__name__])
results.write("\\n" + json.dumps(said) + "\\n")
results.flush()
"""
PASSED = "passed"
Case = tuple[list[Any], Any]
"""A call's arguments, and the value that it must give; both JSON."""
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Coding:
    """An action is a program that defines a function. Its reward is 1 where it passes all tests.

    The task's payload: `prompt`, the function's name as `entry`, and `cases`, a list of
    [arguments, expected value] as JSON. The last fenced block of an action counts, or all of it.
    """

    def __init__(self, sandbox: Sandbox, task: TaskView, tries: int = 1, partial: bool = False):
        """`tries` are the programs that an episode may hand in; with `partial` the last one's
        reward is the share of its tests that pass. UsageError where the payload is no such task.
        """
        self._sandbox = sandbox
        self._tries = tries
        self._partial = partial
        needs = "prompt, entry and cases ([[arguments, value], …])"
        with reading_payload(task, "coding", needs):
            self._prompt = str(task.payload["prompt"])
            self._entry = str(task.payload["entry"])
            self._cases = [(list(arguments), value) for arguments, value in task.payload["cases"]]

    async def prepare(self) -> Observation:
        """Says what the task is."""
        return Observation(text=self._prompt)

    async def act(self, action: str, index: int) -> Observation:
        """Grades a program."""
        blocks = _FENCED.findall(action)
        program = blocks[-1] if blocks else action
        verdicts, why = await grade(self._sandbox, program, self._entry, self._cases)
        return self._graded(verdicts, index, why)

    def _graded(self, verdicts: list[str], index: int, why: str) -> Observation:
        graded = graded_by(verdicts, why)
        over = graded.reward == 1.0 or index >= self._tries
        reward = graded.reward
        if over and self._partial:
            reward = verdicts.count(PASSED) / len(verdicts) if verdicts else 0.0
        return replace(graded, reward=reward, terminated=over)


async def grade(
    sandbox: Sandbox, program: str, entry: str, cases: Sequence[Case]
) -> tuple[list[str], str]:
    """A verdict on each case of a program's function `entry`; and why it was ended, if it was."""
    calls = json.dumps([arguments for arguments, _ in cases])
    command = ("python3", "-I", "-c", RUNNER, program, entry, calls)
    try:
        result = await sandbox.run(command, output_kb=RESULT_KB)
        said, why = _results(result.output), result.ended
    except BadArgument as error:
        said, why = [], str(error)
    answers = [*said, *[None] * len(cases)]
    expected = [value for _, value in cases]
    return [_verdict(*both) for both in zip(answers, expected, strict=False)], why


def graded_by(verdicts: Sequence[str], why: str) -> Observation:
    """What verdicts say: reward 1 where all cases passed."""
    passed, cases = verdicts.count(PASSED), len(verdicts)
    failed = sorted({verdict for verdict in verdicts if verdict != PASSED})
    text = f"{passed} of {cases} tests passed"
    if failed:
        text += f": {', '.join(failed)}"
    if why:
        text += f" [ended: {why}]"
    data = {"passed": passed, "cases": cases}
    return Observation(text=text, data=data, reward=float(passed == cases))


def _results(output: str) -> list[Any]:
    """What the runner's last line says; nothing where a program kept it from saying it."""
    lines = output.rstrip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else []
    except (ValueError, RecursionError):
        return []
    return said if isinstance(said, list) else []


def _verdict(answer: Any, expected: Any) -> str:
    match answer:
        case ["value", value]:
            same = json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)
            return PASSED if same else "wrong value"
        case ["error", str(name)]:
            return name[:40]
    return "no answer"

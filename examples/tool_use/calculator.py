"""A calculator in a container: its tasks, a teacher that demonstrates it, and the tool itself.

The recipe `tool-use.toml` names all three by import path. The correct answer never enters the
container: the env worker compares it with the policy's answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from random import Random

from headrace import BadArgument, Episode, Item, Observation, Sandbox, TaskView, UsageError

EVALUATOR = "import sys; print(eval(sys.argv[1].strip(), {'__builtins__': {}}))"
"""This `eval` is not safe and need not be: the container limits what an expression can do."""
OVERFLOW = "E"
"""The display shows this if the input is not an expression, has no value, or one too long."""
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,18})\s*", re.ASCII)


def sums(
    size: int | None = None, numbers: int = 3, largest: int = 9, seed: int = 0
) -> Iterator[Item]:
    """Yields `size` sums like `7*8-5`, or sums without end if `size` is None.

    A sum is a product, then numbers to add or subtract, so it can be calculated from left to right.
    It has `numbers` numbers from 1 to `largest`. Half of all sums of three numbers occur within the
    first 1,000. The payload has the `prompt`, the `answer`, and the `steps` of someone who
    calculates one operation at a time. The steps are for the teacher: no policy sees them.
    """
    if numbers < 2 or largest < 1:
        raise UsageError(
            f"there are no sums of {numbers} numbers up to {largest}: set `numbers` to at least 2 "
            "and `largest` to at least 1"
        )
    random = Random(seed)
    for number in itertools.count() if size is None else range(size):
        one, other = random.randint(1, largest), random.randint(1, largest)
        others = [random.choice((1, -1)) * random.randint(1, largest) for _ in range(numbers - 2)]
        steps = [f"{one}*{other}", *(f"{value:+d}" for value in others)]
        answer = one * other + sum(others)
        yield Item(str(number), {"prompt": "".join(steps), "answer": answer, "steps": steps})


async def teacher(episode: Episode) -> None:
    """Demonstrates the calculator by the payload's `steps`.

    The agent enters the first step and reads the display. It then enters what the display shows
    followed by the next step, and so on. At the end it answers with the display. The option
    `careless` is the probability that it enters the last step of an episode twice: the answer is
    wrong then, but it is demonstrated all the same.
    """
    careless = float(episode.task.options.get("careless", 0.0))
    steps = [str(step) for step in episode.task.payload["steps"]]
    if episode.random.random() < careless:
        steps.append(steps[-1])
    observation, display = await episode.reset(), ""
    for step in (*steps, ""):
        entered = await episode.generate(observation.text, demonstration=display + step)
        observation = await episode.step(entered.text)
        display = observation.text.rstrip("\n")


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
        try:
            self._prompt = str(task.payload["prompt"])
            self._answer = int(task.payload["answer"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"task {task.number}: the calculator needs a payload of prompt and answer (an "
                f"integer): {type(error).__name__}: {error}"
            ) from error

    async def prepare(self) -> Observation:
        """Returns the prompt."""
        return Observation(text=f"{self._prompt}\n")

    async def act(self, action: str, index: int) -> Observation:
        """Shows the value of an expression, or checks the answer."""
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

"""A solver that answers sums, and a verifier that says whether an answer is right.

The environment knows the sum, and gives both their rewards. A coin decides whether the verifier
sees the solver's answer or another one, and of these two exactly one is right. So an answer that it
sees is right in half of the episodes, however good the solver is, and a verifier that always says
the same gets 0.5. The solver gets half a point if its answer is right, and the other half if the
verifier's verdict is right, too. A wrong answer gets nothing, whatever the verifier says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace import Environment, Episode, Item, Observation, TaskView

RIGHT, WRONG = "Y", "N"
"""The verdicts."""


def sums(*, largest: int = 2, seed: int = 0) -> Iterator[Item]:
    """Yields every sum of two numbers up to `largest` once, shuffled."""
    numbers = range(largest + 1)
    items = [(one, other) for one in numbers for other in numbers]
    random.Random(seed).shuffle(items)
    for one, other in items:
        yield Item(f"{one}+{other}", {"question": f"{one}+{other}", "answer": str(one + other)})


class Sums(Environment):
    """Grades an answer, then the verdicts on it and on another answer."""

    replayable = True

    def __init__(self, *, largest: int = 2) -> None:
        """`largest` is that of `sums`."""
        self._largest = largest

    async def reset(self, task: TaskView) -> Observation:
        """Asks the question of the task."""
        self._answer = str(task.payload["answer"])
        self._random = random.Random(f"{task.seed}/{task.sample}")
        self._said: str | None = None
        return Observation(str(task.payload["question"]))

    async def step(self, action: str) -> Observation:
        """Takes the solver's answer, and then the verdict on the answer that it returned."""
        if self._said is None:
            self._said = action
            self._shown = self._random.choice([action, self._other(action)])
            return Observation(self._shown)
        solved = self._said == self._answer
        verified = action == (RIGHT if self._shown == self._answer else WRONG)
        rewards = {"solver": solved * (0.5 + 0.5 * verified), "verifier": float(verified)}
        return Observation(rewards=rewards, terminated=True)

    async def aclose(self) -> None:
        """Holds nothing."""

    def _other(self, said: str) -> str:
        """Returns a wrong answer if `said` is right, and the right one otherwise."""
        if said != self._answer:
            return self._answer
        wrong = [str(number) for number in range(2 * self._largest + 1)]
        wrong.remove(self._answer)
        return self._random.choice(wrong)


async def solve_and_verify(episode: Episode) -> None:
    """The solver answers, and the verifier judges an answer without knowing whose it is."""
    question = (await episode.reset()).text
    answer = await episode.generate(f"{question}=", role="solver")
    shown = await episode.step(answer.text)
    verdict = await episode.generate(f"{question}={shown.text}?", role="verifier")
    await episode.step(verdict.text)

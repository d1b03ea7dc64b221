"""A solver that answers sums, and a verifier that says which answers are right.

The environment knows the sum, and gives both their rewards. The verifier judges two answers, of
which exactly one is right: the solver's, and another one. So a verifier that always says the same
gets 0.5, however good the solver is. The solver gets half a point if its answer is right, and the
other half if the verifier accepts it, too. A wrong answer gets nothing, even if it is accepted.
"""

from __future__ import annotations

import json
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
        """Takes the solver's answer, and then the verdicts as JSON: on it and on the other one."""
        if self._said is None:
            self._said = action
            return Observation(data={"other": self._other(action)})
        own, other = json.loads(action)
        solved = self._said == self._answer
        verified = (own == (RIGHT if solved else WRONG)) + (other == (WRONG if solved else RIGHT))
        rewards = {
            "solver": solved * (0.5 + 0.5 * (own == RIGHT)),
            "verifier": 0.5 * verified,
        }
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
    """The solver answers. The verifier judges two answers, each without knowing of the other."""
    question = (await episode.reset()).text
    answer = (await episode.generate(f"{question}=", role="solver")).text
    graded = await episode.step(answer)

    async def verdict(candidate: str) -> str:
        asked = episode.new_conversation("verifier")
        return (await asked.generate(f"{question}={candidate}?")).text

    verdicts = await episode.gather(lambda: verdict(answer), lambda: verdict(graded.data["other"]))
    await episode.step(json.dumps(verdicts))

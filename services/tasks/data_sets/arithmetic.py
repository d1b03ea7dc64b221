"""Small sums for the tool `calculator` of sandboxes: as many as are wanted, of one seed.

`7*8-5`: a product, then numbers to add or to take away, so that calculating from left to right is
right. Half of all sums of three numbers come up within the first 1,000.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from headrace.errors import UsageError
from headrace.services.tasks.task_maker import Item


def items(
    size: int | None = None, numbers: int = 3, largest: int = 9, seed: int = 0
) -> Iterator[Item]:
    """`size` sums, or without end: of so many `numbers`, each from 1 to `largest`.

    The payload: `prompt`, the `answer`, and the `steps` of who calculates one operation at a time,
    which continue each other: a task's own, for who demonstrates; no policy is told of them.
    """
    if numbers < 2 or largest < 1:
        raise UsageError(
            f"arithmetic of {numbers} numbers up to {largest}: it takes 2 numbers, up to 1, or more"
        )
    random = Random(seed)
    for number in itertools.count() if size is None else range(size):
        first, second = random.randint(1, largest), random.randint(1, largest)
        others = [random.choice((1, -1)) * random.randint(1, largest) for _ in range(numbers - 2)]
        steps = [f"{first}*{second}", *(f"{value:+d}" for value in others)]
        answer = first * second + sum(others)
        payload = {"prompt": "".join(steps), "answer": answer, "steps": steps}
        yield Item(str(number), payload)

"""How many workers a pool needs. Pure functions.

The rule for training is AstraFlow's (arXiv 2605.15565): it follows the share of time for which the
trainer waits for batches.
"""

from __future__ import annotations

from math import ceil

STARVED, SATED = 0.10, 0.05
"""Above the first share of waiting the pool grows, below the second one it may shrink."""
SPARE = 1.10
"""A pool that shrinks keeps a tenth more than was used."""
FULL = 0.8
"""Without a trainer, a pool that uses less than this share of its slots may shrink."""
MOST_WAIT = 0.99
"""A larger share of waiting counts as this one."""
_ROUNDING = 1e-9


def scale_by_wait(workers: int, wait: float, used: float) -> int:
    """Returns the number of workers with which the trainer hardly waits and little is left unused.

    `wait` is the share of its time for which the trainer waits for batches. `used` is the share of
    what the workers can produce that is trained on (AstraFlow's consumed divided by entered).
    """
    if wait > STARVED:
        return _up(workers / (1 - min(wait, MOST_WAIT)))
    if wait < SATED:
        return min(workers, _up(workers * used * SPARE))
    return workers


def fill(workers: int, load: float) -> int:
    """Returns the largest number of workers that could be busy.

    `load` is the number of prompts that are generated or wait, for each slot.
    """
    return _up(workers * load * SPARE)


def scale_by_load(workers: int, load: float) -> int:
    """Returns the number of workers for a run without a trainer.

    `load` is the number of prompts that are generated or wait, for each slot.
    """
    if load > 1:
        return _up(workers * load)
    if load < FULL:
        return min(workers, fill(workers, load))
    return workers


def _up(number: float) -> int:
    return ceil(number - _ROUNDING)

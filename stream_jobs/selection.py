"""Selections: which samples of a group are trained on. The log records what they leave out.

A task is played more often than it is trained on (`tasks.samples`), and a selection keeps the
samples from which most is learned, or as many as there is compute for. All samples count in the
group's mean and deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from pydantic import model_validator

from headrace.errors import HeadraceError
from headrace.schemas.events import TaskEnded
from headrace.schemas.recipe.tables import Choice, Positive, Settings, use_and_options
from headrace.services.base.plugins import load_with_options

NOT_SELECTED = "not_selected"
"""The reason to leave out a sample that a selection did not keep."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The samples of a group from which a selection chooses: those that may be trained on.

    Each tuple has one value for each sample, in the order of the samples' numbers; there is at
    least one. A sample's number says nothing about its length.
    """

    task: int
    policy: str
    item_id: str
    epoch: int
    rewards: tuple[float, ...]
    tokens: tuple[int, ...]
    """Trainable tokens of this policy."""


Selection = Callable[[Candidates], Sequence[int]]
"""Returns the indices of the samples to keep: at least one, and each once.

If it has an attribute `advantages` that is "all", advantages are computed from the rewards of all
samples; otherwise from those of the kept ones."""

SELECTIONS = {"best_of": f"{__name__}:BestOf"}
"""The built-in selections by the recipe's name."""


class BestOf(Settings):
    """Keeps some samples of a group that has more of them.

    - `by = "variance"`: the samples whose rewards have the largest variance. These are always some
      of the highest and some of the lowest rewards. PODS (arXiv 2504.13818), section 3.2, which
      computes the advantages from the kept samples alone, as is the default here.
    - `by = "tokens"`: samples in the order of their numbers, until they have `max_tokens` tokens.
      The sample that reaches this number is kept, too: without it, long samples would be left out
      more often than short ones. So the sums over all kept samples are unbiased (Wald's identity),
      and a group exceeds the number by less than its last sample. What remains: a group of short
      samples keeps more of them than a group of long ones.
    """

    samples: Positive
    """The most samples that are kept. The others of `tasks.samples` are played, and left out."""
    by: Literal["variance", "tokens"] = "variance"
    """What decides."""
    max_tokens: Positive | None = None
    """With `by = "tokens"`: the trainable tokens of a group after which no further sample is
    kept."""
    advantages: Literal["selected", "all"] = "selected"
    """`selected`: the advantages are computed from the rewards of the kept samples. `all`: from
    those of all samples, which estimates the baseline better if rewards do not decide what is
    kept."""

    @model_validator(mode="after")
    def _tokens_need_a_number(self) -> BestOf:
        if (self.by == "tokens") != (self.max_tokens is not None):
            raise ValueError('`max_tokens` belongs to by = "tokens": set both or none')
        return self

    def __call__(self, candidates: Candidates) -> Sequence[int]:
        """Returns the indices of the kept samples."""
        if self.max_tokens is not None:
            return _first(candidates.tokens, self.samples, self.max_tokens)
        return most_varied(candidates.rewards, self.samples)


def _first(tokens: Sequence[int], samples: int, max_tokens: int) -> list[int]:
    kept: list[int] = []
    total = 0
    for index, count in enumerate(tokens):
        if len(kept) == samples or total >= max_tokens:
            break
        kept.append(index)
        total += count
    return kept


def most_varied(rewards: Sequence[float], samples: int) -> list[int]:
    """Returns the indices of `samples` rewards with the largest variance, ascending.

    They are the k lowest and the highest of the rest, for the best k. Of equal rewards, the first
    ones are low, and if several k are best, the smallest one counts.
    """
    order = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    samples = min(samples, len(order))
    best, most = order[:samples], -1.0
    for low in range(samples + 1):
        chosen = order[:low] + order[len(order) - samples + low :]
        mean = fsum(rewards[index] for index in chosen) / samples
        spread = fsum((rewards[index] - mean) ** 2 for index in chosen)
        if spread > most:
            best, most = chosen, spread
    return sorted(best)


class Selector:
    """The selection of one policy's recipe, or none."""

    def __init__(self, policy: str, choice: Choice | None) -> None:
        """Raises UsageError if `choice` can't be loaded."""
        self._policy = policy
        self._name = "" if choice is None else use_and_options(choice)[0]
        self._selection: Selection | None = None
        if choice is not None:
            self._selection = load_with_options("selection", choice, SELECTIONS)

    @property
    def compares_all(self) -> bool:
        """Whether advantages are computed from the rewards of all samples, kept or not."""
        return getattr(self._selection, "advantages", "selected") == "all"

    def keep(
        self, ended: TaskEnded, rewards: Sequence[float], tokens: Sequence[int]
    ) -> Sequence[int]:
        """Returns the indices of the samples that are kept, ascending.

        Raises HeadraceError if the selection returns something else, or none.
        """
        if self._selection is None or not rewards:
            return range(len(rewards))
        candidates = Candidates(
            task=ended.task,
            policy=self._policy,
            item_id=ended.item_id,
            epoch=ended.epoch,
            rewards=tuple(rewards),
            tokens=tuple(tokens),
        )
        return selected(self._name, self._selection, candidates)


def selected(name: str, selection: Selection, candidates: Candidates) -> list[int]:
    """Returns the indices that a selection keeps, ascending.

    `name` is the recipe's name of it. Raises HeadraceError if they are not indices of samples, not
    distinct, or none.
    """
    kept = list(selection(candidates))
    numbers = range(len(candidates.rewards))
    if not kept or len(set(kept)) < len(kept) or any(one not in numbers for one in kept):
        raise HeadraceError(
            f"selection {name!r} returned {kept} for the {len(numbers)} samples of task "
            f"{candidates.task}. Make it return the indices of the samples to keep, at least one "
            "and each once"
        )
    return sorted(kept)

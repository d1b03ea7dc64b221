"""A learner in several processes: what rank 0 does, the others do with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.trainer.learner import Learner
from headrace.trainer.ranks.rank_group import RankGroup
from headrace.trainer.sequences import Floats, Stopped, TokenSequence, UnusableBatch, UpdateBatch

if TYPE_CHECKING:
    from headrace.trainer.model_loading import FrozenBase

END = "end"


class SharedLearner:
    """The learner of rank 0. Each call is repeated by the learners of the other ranks.

    It hands over the sequences of a batch. They are small beside the model, and so only rank 0
    reads the log.
    """

    def __init__(self, group: RankGroup, folder: Path, policy: Policy) -> None:
        """Loads version 0 in each rank. Raises UsageError as `Learner` does."""
        self._group = group
        group.tell("load", folder, policy)
        self._learner = Learner(folder, policy, group.ranks)

    @property
    def base(self) -> FrozenBase | None:
        """As in `Learner`."""
        return self._learner.base

    @property
    def processes(self) -> int:
        """As in `Learner`."""
        return self._learner.processes

    @property
    def vocabulary(self) -> int:
        """As in `Learner`."""
        return self._learner.vocabulary

    @property
    def updates_done(self) -> int:
        """As in `Learner`."""
        return self._learner.updates_done

    @property
    def start_logprobs(self) -> list[tuple[TokenSequence, Floats]]:
        """As in `Learner`."""
        return self._learner.start_logprobs

    def weights(self) -> bytes:
        """As in `Learner`."""
        self._group.tell("weights")
        return self._learner.weights()

    def write_weights(self, path: Path) -> None:
        """As in `Learner`."""
        self._group.tell("write_weights", path)
        self._learner.write_weights(path)

    def train(
        self, updates: Sequence[UpdateBatch], stop: threading.Event | None = None
    ) -> dict[str, float]:
        """As in `Learner`, with the metric `processes`.

        Raises DependencyError if a rank is gone.
        """
        self._group.tell("train", updates)
        metrics = self._learner.train(updates, stop)
        return metrics | {"processes": float(self.processes)}

    def cross_entropy(
        self, update: UpdateBatch, stop: threading.Event | None = None
    ) -> tuple[float, int]:
        """As in `Learner`."""
        self._group.tell("cross_entropy", update)
        return self._learner.cross_entropy(update, stop)

    def save(self, path: Path) -> None:
        """As in `Learner`. All ranks write to the same folder."""
        self._group.tell("save", path)
        self._learner.save(path)

    def load(self, path: Path) -> None:
        """As in `Learner`. All ranks read the same file or folder."""
        self._group.tell("restore", path)
        self._learner.load(path)

    def close(self) -> None:
        """Lets the other ranks end."""
        self._group.tell(END)
        self._group.close()


def follow(group: RankGroup, check: Callable[[], None] = lambda: None) -> None:
    """Repeats what rank 0 does, until it ends. `check` is called while this rank waits for it."""
    learner: Learner | None = None
    while True:
        method, arguments = group.hear(check)
        if method == END:
            group.close()
            return
        if method == "load":
            folder, policy = arguments
            learner = Learner(folder, policy, group.ranks)
            continue
        assert learner is not None, "rank 0 loads before it does anything else"
        with suppress(UnusableBatch, Stopped, UsageError):  # Rank 0 raises the same.
            _repeat(learner, method, *arguments)


def _repeat(learner: Learner, method: str, *arguments: object) -> None:
    work: dict[str, Callable[..., object]] = {
        "weights": learner.weights,
        "write_weights": learner.write_weights,
        "train": learner.train,
        "cross_entropy": learner.cross_entropy,
        "save": learner.save,
        "restore": learner.load,
    }
    if method not in work:
        raise HeadraceError(f"rank 0 asks for {method}, which this rank can't do")
    work[method](*arguments)

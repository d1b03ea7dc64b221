"""Learns sequences by cross-entropy, update by update, and can be stopped and continued.

It uses the learner of the trainer: to it, what is learned here is demonstrated. All of it runs in
the learner's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, UsageError
from headrace.services.operate.sft.sft_checkpoints import read_figures, write_figures
from headrace.services.operate.sft.sft_plan import SftPlan
from headrace.services.operate.sft.sft_stop import SftStop
from headrace.trainer.checkpoint import Checkpoint, Checkpoints
from headrace.trainer.sequences import (
    NothingFits,
    Stopped,
    TokenSequence,
    UnusableBatch,
    UpdateBatch,
)

if TYPE_CHECKING:
    # It imports torch.
    from headrace.trainer.ranks.with_learner import AnyLearner


SAVE_S = 60.0
"""Least seconds from one checkpoint to the next."""
SAVE_SHARE = 20
"""The same, in durations of a checkpoint: nothing is learned while one is written."""
_KEPT = ("losses", "held_out", "rate", "tokens", "dropped")


@dataclass
class SftProgress:
    """How far a fine-tuning is. Its thread writes it, and a view reads it."""

    updates: int
    """Of all epochs."""
    epoch_ends: Sequence[int]
    done: int = 0
    continued: int = 0
    """How many updates a checkpoint had."""
    losses: list[float] = field(default_factory=list)
    """The mean cross-entropy of each update's tokens before it, in nats."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Numbers of updates, and the held-out part's cross-entropy after them, in nats."""
    rate: float = 0.0
    """The learning rate of the newest update."""
    tokens: int = 0
    """How many tokens were learned, those before a checkpoint included."""
    tokens_before: int = 0
    """How many of them a checkpoint had."""
    dropped: int = 0
    """How many sequences did not fit into the memory."""
    saved: int | None = None
    """How many updates the newest checkpoint has. None without a checkpoint."""

    def facts(self) -> dict[str, Any]:
        """Returns the figures of a fine-tuning that is done, for its `headrace.json`."""
        last = {"cross_entropy": self.losses[-1]} if self.losses else {}
        held = {"held_out_cross_entropy": dict(self.held_out)} if self.held_out else {}
        return {
            "updates": self.done,
            "epochs": len(self.epoch_ends),
            "tokens": self.tokens,
            "dropped": self.dropped,
            **last,
            **held,
        }

    def kept(self) -> dict[str, Any]:
        """Returns the figures that a checkpoint keeps."""
        return {name: getattr(self, name) for name in _KEPT}

    def restore(self, done: int, kept: Mapping[str, Any]) -> None:
        """Continues after `done` updates with what `kept` returned."""
        for name in _KEPT:
            setattr(self, name, kept[name])
        self.held_out = [(int(at), float(value)) for at, value in self.held_out]
        self.done = self.continued = self.saved = done
        self.tokens_before = self.tokens

    @property
    def epoch(self) -> int:
        """The number of the epoch that is under way, from 1 on."""
        ended = sum(end <= self.done for end in self.epoch_ends)
        return min(ended + 1, len(self.epoch_ends))


class FineTuning:
    """One fine-tuning."""

    def __init__(
        self,
        learner: AnyLearner,
        sequences: Sequence[TokenSequence],
        plan: SftPlan,
        checkpoints: Checkpoints,
        digest: bytes,
        progress: SftProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`digest` is that of all that the result follows from: a checkpoint must have the same.

        `clock` returns seconds.
        Raises UsageError if a token id is not one of the model's.
        """
        highest = max(int(one.tokens.max()) for one in sequences)
        if highest >= learner.vocabulary:
            raise UsageError(
                f"the tokenizer has the id {highest}, but the model has only "
                f"{learner.vocabulary}: the folder's tokenizer.json is of another model"
            )
        self._learner = learner
        self._sequences = sequences
        self._plan = plan
        self._updates = plan.updates
        self._checkpoints = checkpoints
        self._digest = digest
        self._progress = progress
        self._clock = clock
        self._saved_at = clock()
        self._save_s = 0.0
        """How long the last checkpoint took, in seconds."""

    def resume(self, checkpoint: Checkpoint, state: Path) -> None:
        """Continues from a checkpoint. Raises UsageError if its figures can't be read."""
        self._progress.restore(checkpoint.version, read_figures(state))
        self._learner.load(state)

    def run(self, stop: SftStop, say: Callable[[str], None]) -> bool:
        """Makes the updates that are left. Returns whether all are made and measured now.

        Stops before the next update if `stop.stopping` is set, and within an update, which it then
        drops, if `stop.cut` is. Writes a checkpoint now and then, and in the end, but none that
        would take longer than `stop.save_by`. Raises HeadraceError if an update can't be made.
        """
        progress = self._progress
        ends = {0, *progress.epoch_ends}
        try:
            if progress.done in ends - dict(progress.held_out).keys():
                self._measure(stop.cut, say)
            while progress.done < len(self._updates) and not stop.stopping.is_set():
                self._update(stop.cut, say)
                if progress.done in ends:
                    self._measure(stop.cut, say)
                least_s = max(SAVE_S, SAVE_SHARE * self._save_s)
                if self._clock() - self._saved_at >= least_s and not stop.stopping.is_set():
                    self.save()
        except Stopped:
            self._save_last(stop, say)
            return False
        self._save_last(stop, say)
        return progress.done == len(self._updates)

    def _save_last(self, stop: SftStop, say: Callable[[str], None]) -> None:
        """Writes a checkpoint, unless the one before took longer than the time that is left."""
        if self._clock() + self._save_s <= stop.save_by:
            self.save()
        elif self._progress.done != self._progress.saved:
            say(
                f"no checkpoint of update {self._progress.done} is written, because the last one "
                f"took {self._save_s:.1f} s, and the process must end before that. Ctrl-C or "
                "SIGINT, instead of SIGTERM, waits for it"
            )

    def save(self) -> None:
        """Writes a checkpoint, if updates were made since the last one."""
        done = self._progress.done
        if done == self._progress.saved:
            return
        checkpoint = Checkpoint(done, done, self._digest, self._learner.processes)

        def write(state: Path) -> None:
            self._learner.save(state)
            write_figures(state, self._progress.kept())

        began = self._clock()
        self._checkpoints.save(checkpoint, write)
        self._progress.saved, self._saved_at = done, self._clock()
        self._save_s = self._saved_at - began

    def _update(self, cut: threading.Event, say: Callable[[str], None]) -> None:
        progress = self._progress
        number = progress.done + 1
        batch = UpdateBatch([self._sequences[index] for index in self._updates[number - 1]])
        try:
            metrics = self._learner.train([batch], cut)
        except NothingFits:
            count = len(batch.sequences)
            progress.dropped += count
            say(f"update {number} left out all its {count} sequences: they do not fit into memory")
            progress.done = number
            return
        except UnusableBatch as error:
            self.save()  # The weights are as they were before the update.
            raise HeadraceError(
                f"update {number} of {len(self._updates)} can't be made: {error}. Lower "
                "--learning-rate, or look at the data"
            ) from error
        progress.losses.append(metrics["cross_entropy"])
        progress.rate = metrics.get("learning_rate", 0.0)
        progress.tokens += int(metrics["demonstrated_tokens"])
        if dropped := int(metrics["dropped_samples"]):
            progress.dropped += dropped
            say(f"update {number} left out {dropped} sequences that do not fit into the memory")
        progress.done = number

    def _measure(self, cut: threading.Event, say: Callable[[str], None]) -> None:
        nats, measured, expected = 0.0, 0, 0
        for part in self._plan.measured:
            batch = UpdateBatch([self._sequences[index] for index in part])
            expected += batch.tokens
            with suppress(UnusableBatch):  # No sequence of the part fits into the memory.
                of_part, tokens = self._learner.cross_entropy(batch, cut)
                nats, measured = nats + of_part, measured + tokens
        done = self._progress.done
        if measured:
            self._progress.held_out.append((done, nats / measured))
        if measured < expected:
            say(
                f"after update {done}: {expected - measured} of {expected} held-out tokens can't "
                "be measured, because their sequences do not fit into the memory or the model"
            )

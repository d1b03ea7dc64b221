"""A batch as other trainers get it: token sequences as numpy arrays, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.schemas.events import BatchSample, TrajectoryRecorded
from headrace.schemas.role_rewards import policy_reward
from headrace.trainer.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample of a batch comes from."""

    task: int
    """The task's number."""
    sample: int
    """Which of the task's episodes it is, from 0."""
    attempt: int
    """The attempt of the episode that was recorded."""
    reward: float | None
    """What the policy got in the episode. None if the episode has no reward."""
    weight: float
    """Factor of the sample's loss. The advantages are multiplied by it already."""
    use: int
    """Number of earlier batches with the same sample. 0 means fresh."""

    @classmethod
    def of(cls, sample: BatchSample, trajectory: TrajectoryRecorded, policy: str) -> SampleOrigin:
        """Returns the origin of a sample whose trajectory this is."""
        return cls(
            task=sample.task,
            sample=sample.sample,
            attempt=trajectory.attempt,
            reward=policy_reward(trajectory, policy),
            weight=sample.weight,
            use=sample.use,
        )


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What version n is trained on. `plan` divides it among ranks.

    It can be pickled, so one rank can read it and send it to the others.
    """

    version: int
    """The version that training on it makes."""
    published: bool
    """Whether that version is published already, and is only made again after a restart."""
    sequences: Sequence[TokenSequence]
    """The sequences of all samples that can be trained on."""
    origins: Mapping[int, SampleOrigin]
    """Where the samples come from, by `TokenSequence.sample`."""
    seed: int
    """Random seed for the training on this batch."""
    metrics: Mapping[str, float]
    """What is known before training: `reward_mean`, staleness, drops and so on."""

    @property
    def tokens(self) -> int:
        """The number of trained tokens."""
        return sum(len(one.positions) for one in self.sequences)

    def split(self, minibatches: int) -> list[TrainingBatch]:
        """Divides the batch into at most so many parts, one for each optimizer update.

        The samples of a group are spread evenly over the parts. A part without sequences is left
        out.
        """
        parts = (
            [one for one in self.sequences if one.sample % minibatches == number]
            for number in range(minibatches)
        )
        return [replace(self, sequences=part) for part in parts if part]

"""Puts the story of a training step together: a batch, its trajectories, and the new version.

Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.events import BatchAssembled, Event, PolicyPublished, TrajectoryRecorded
from headrace.services.log.unpacked import floats_in, versions_in
from headrace.services.operate.evaluation import EvaluationResult
from headrace.services.operate.show.facts import Fact, location_of


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """One sample of a batch, with facts from its trajectory."""

    task: int
    sample: int
    trajectory: str
    """The trajectory's location."""
    gone: str
    """Why the trajectory can't be read; empty if it can."""
    reward: float | None
    ending: str
    turns: int
    tokens: int
    """Sampled tokens that are trained on."""
    versions: tuple[int, ...]
    """The versions that sampled the policy's turns in the trajectory, ascending."""
    staleness: int
    """By how many versions the oldest token is behind the version before the batch's."""
    advantages: tuple[float, ...]
    use: int
    """0 if it is fresh; n in its nth replay."""


@dataclass(frozen=True, slots=True)
class StepStory:
    """Batch n and version n of a policy. One of them may be absent: version 0 has no batch."""

    policy: str
    version: int
    batch: Fact[BatchAssembled] | None
    samples: list[TrainedSample]
    publications: list[Fact[PolicyPublished]]
    """The publications of this version in log order. The last one counts."""
    weights: dict[str, bool]
    """Whether each blob of weights, by its SHA-256 in hex, is in the blob store."""
    evaluation: EvaluationResult | None
    """The evaluation of this version by the tasks that have ended."""
    remarks: list[str]
    """What could not be read."""


def make_sample(batch: BatchAssembled, index: int, trajectory: Event | str) -> TrainedSample:
    """Makes sample `index` of a batch. `trajectory` is a text if it can't be read: the reason."""
    sample = batch.samples[index]
    known = trajectory if isinstance(trajectory, TrajectoryRecorded) else None
    turns = [turn for turn in known.turns if turn.policy == batch.policy] if known else []
    versions = {version for turn in turns for version in versions_in(turn.versions)}
    oldest = sample.oldest_version
    return TrainedSample(
        task=sample.task,
        sample=sample.sample,
        trajectory=location_of(sample.trajectory),
        gone=trajectory if isinstance(trajectory, str) else "",
        reward=known.reward if known else None,
        ending=known.ending if known else "",
        turns=len(turns),
        tokens=sample.tokens,
        versions=tuple(sorted(versions)) or ((oldest,) if oldest >= 0 else ()),
        staleness=batch.version - 1 - oldest if oldest >= 0 else 0,
        advantages=tuple(floats_in(sample.advantages)),
        use=sample.use,
    )

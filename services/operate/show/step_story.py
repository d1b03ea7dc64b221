"""The story of an optimizer step: a batch, its trajectories, and the version made of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.events import BatchAssembled, Event, PolicyPublished, TrajectoryRecorded
from headrace.services.operate.evaluation import EvaluationResult
from headrace.services.operate.show.facts import Fact, of_type, place_of
from headrace.services.operate.show.unpacked import floats_in, versions_in


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """One sample of a batch, with what its trajectory says."""

    task: int
    sample: int
    trajectory: str
    """Its place."""
    gone: str
    """Why the trajectory can't be read; else empty."""
    reward: float | None
    ending: str
    turns: int
    tokens: int
    """Sampled tokens that are trained on."""
    versions: tuple[int, ...]
    """The versions that sampled them, ascending; of the whole trajectory's turns of the policy."""
    staleness: int
    """By how many versions the oldest token is behind the batch's start."""
    advantages: tuple[float, ...]
    use: int
    """0 is fresh; n is the nth replay."""

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class StepStory:
    """Batch n and version n of a policy. Either may not be there: version 0 has no batch."""

    policy: str
    version: int
    batch: Fact[BatchAssembled] | None
    samples: tuple[TrainedSample, ...]
    publications: tuple[Fact[PolicyPublished], ...]
    """Of this version, in log order: the last one counts."""
    weights: dict[str, bool]
    """Whether each weights blob, by its SHA-256, is in the blob store."""
    evaluation: EvaluationResult | None = None
    """Of this version, as far as its tasks have ended."""

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "version": self.version,
            "batch": None if self.batch is None else self.batch.to_tree(),
            "samples": [one.to_tree() for one in self.samples],
            "publications": [one.to_tree() for one in self.publications],
            "weights": self.weights,
            "evaluation": None if self.evaluation is None else self.evaluation.to_tree(),
        }


def tell_sample(batch: BatchAssembled, index: int, trajectory: Event | str) -> TrainedSample:
    """Sample `index` of a batch, by what its reference led to: an event, or why there is none."""
    sample = batch.samples[index]
    known = trajectory if isinstance(trajectory, TrajectoryRecorded) else None
    turns = [turn for turn in known.turns if turn.policy == batch.policy] if known else []
    versions = {version for turn in turns for version in versions_in(turn.versions)}
    oldest = sample.oldest_version
    return TrainedSample(
        task=sample.task,
        sample=sample.sample,
        trajectory=place_of(sample.trajectory),
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


def tell_step(
    policy: str,
    version: int,
    facts: Sequence[Fact[Event]],
    samples: Sequence[TrainedSample],
    weights: dict[str, bool],
    evaluation: EvaluationResult | None = None,
) -> StepStory:
    """The story of a step. Facts of other versions and policies are left out."""
    batches = of_type(facts, BatchAssembled)
    published = of_type(facts, PolicyPublished)
    key = (policy, version)
    return StepStory(
        policy,
        version,
        next((one for one in batches if (one.event.policy, one.event.version) == key), None),
        tuple(samples),
        tuple(one for one in published if (one.event.policy, one.event.version) == key),
        weights,
        evaluation,
    )

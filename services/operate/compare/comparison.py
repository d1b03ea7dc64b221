"""Compares the versions of a run with those of its replays, or of other runs. Pure.

In a replay the episodes are data: the recorded policy generated them, the replayed policy did not.
So `reward_mean` of a replay is the mean reward of recorded episodes, and says nothing about the
replayed policy. The other metrics are computed on the recorded tokens. Only an evaluation measures
what the replayed policy does by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import PolicyPublished
from headrace.services.operate.evaluation import Estimate, EvaluationResult

METRICS = (
    "reward_mean", "loss", "cross_entropy", "grad_norm", "entropy", "kl", "clip_fraction",
    "importance_mean",
)  # fmt: skip
"""The metrics of a version that the table and the plot show, if a run has them."""
DATA = ("reward_mean", "tokens", "demonstrated_tokens")
"""The metrics that a version's batch decides. Equal batches have equal values."""
SCALES = ("training.loss", "groups.advantage")
"""The keys of a policy that give its loss another scale."""


@dataclass(frozen=True)
class ComparedRun:
    """The versions of one policy in one run."""

    namespace: str
    replay_of: str | None
    """The namespace of the run that it replays, or None."""
    versions: Mapping[int, PolicyPublished]
    changes: tuple[str, ...] = ()
    """How its recipe differs from that of the first run, as `key: first -> this`."""


@dataclass
class Comparison:
    """A policy in the first run and in the others."""

    policy: str
    first: ComparedRun
    others: Sequence[ComparedRun]
    evaluations: dict[str, EvaluationResult] = field(default_factory=dict)
    """By namespace."""

    @property
    def runs(self) -> list[ComparedRun]:
        """All runs, the first one first."""
        return [self.first, *self.others]

    def metrics(self) -> list[str]:
        """Returns the names in METRICS that at least one version has."""
        known = {name for run in self.runs for one in run.versions.values() for name in one.metrics}
        return [name for name in METRICS if name in known]

    def rows(self) -> Iterator[tuple[int, ComparedRun, PolicyPublished]]:
        """Yields each version of each run, sorted by version and then as in `runs`."""
        for version in sorted({version for run in self.runs for version in run.versions}):
            for run in self.runs:
                if version in run.versions:
                    yield version, run, run.versions[version]

    def common(self, run: ComparedRun) -> list[int]:
        """Returns the versions that the first run and this one have, ascending."""
        return sorted(self.first.versions.keys() & run.versions.keys())

    def newest_common(self) -> int | None:
        """Returns the newest version that all runs have, or None."""
        return max(set.intersection(*(set(run.versions) for run in self.runs)), default=None)

    def first_other_weights(self, run: ComparedRun) -> int | None:
        """Returns the first version whose weights differ from those of the first run, or None."""
        return self._first(run, lambda ours, theirs: ours.digest != theirs.digest)

    def first_other_batch(self, run: ComparedRun) -> int | None:
        """Returns the first version whose batch held other samples than in the first run, or None.

        Such a batch shows in its reward or its number of tokens. Skipped versions are left out.
        """
        return self._first(run, _other_data)

    def _first(
        self, run: ComparedRun, differ: Callable[[PolicyPublished, PolicyPublished], bool]
    ) -> int | None:
        both = ((n, self.first.versions[n], run.versions[n]) for n in self.common(run))
        return next((version for version, ours, theirs in both if differ(ours, theirs)), None)

    def difference(self, run: ComparedRun) -> Estimate | None:
        """Returns avg@k of a run minus that of the first run, or None if it was not evaluated."""
        first, other = (self.evaluations.get(one.namespace) for one in (self.first, run))
        if run is self.first or first is None or other is None:
            return None
        return other.minus(first)

    def differences(self, run: ComparedRun) -> list[str]:
        """Says where a run begins to differ from the first one."""
        common = self.common(run)
        if not common:
            return [f"has no version of policy {self.policy} that {self.first.namespace} has too"]
        both = f"all {len(common)} versions that both runs have"
        weights, batch = self.first_other_weights(run), self.first_other_batch(run)
        return [
            f"weights: the same in {both}"
            if weights is None
            else f"weights: differ from version {weights} on",
            f"batches: no other reward or number of tokens in {both}"
            if batch is None
            else f"batches: hold other samples from version {batch} on",
        ]

    def notes(self) -> list[str]:
        """Says what the figures can show and what they can't."""
        notes = [
            f"{run.namespace} is a replay of {run.replay_of}. The recorded policy generated the "
            "episodes, the replayed policy generated none. So reward_mean is the reward of "
            "recorded episodes, and does not measure the replayed policy."
            if run.replay_of is not None
            else f"{run.namespace} is not a replay. Its figures are measured on its own episodes."
            for run in self.runs
            if run is not self.first or run.replay_of is not None
        ]
        if any(run.replay_of is not None for run in self.runs):
            notes.append(
                "The other metrics of a replay are computed on the recorded tokens. The larger its "
                "kl, and the further importance_mean is from 1, the further the replayed policy "
                "has moved from the policy that generated them, and the less a replay says about "
                "a run with the same settings."
            )
            if not self.evaluations:
                notes.append("--evaluate lets both policies play, and so measures both.")
        scales = tuple(f"policies.{self.policy}.{key}:" for key in SCALES)
        if any(change.startswith(scales) for run in self.others for change in run.changes):
            notes.append(
                "The recipes compute the loss in different ways, so loss and grad_norm have "
                "different scales."
            )
        return notes

    def to_tree(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "policy": self.policy,
            "runs": [self._run_tree(run) for run in self.runs],
            "notes": self.notes(),
        }

    def _run_tree(self, run: ComparedRun) -> dict[str, Any]:
        evaluation, difference = self.evaluations.get(run.namespace), self.difference(run)
        return {
            "namespace": run.namespace,
            "replay_of": run.replay_of,
            "changes": list(run.changes),
            "first_other_weights": self.first_other_weights(run),
            "first_other_batch": self.first_other_batch(run),
            "evaluation": None
            if evaluation is None
            else {
                "version": self.newest_common(),
                **evaluation.to_tree(),
                "minus_first": None if difference is None else difference.to_tree(),
            },
            "versions": [
                {
                    "version": version,
                    "status": one.status,
                    "digest": one.digest.hex(),
                    "metrics": one.metrics,
                }
                for version, one in run.versions.items()
            ],
        }


def _other_data(ours: PolicyPublished, theirs: PolicyPublished) -> bool:
    if "skipped" in (ours.status, theirs.status):
        return False
    pairs = [(ours.metrics.get(name), theirs.metrics.get(name)) for name in DATA]
    return any(
        (ours is None) != (theirs is None)
        or (ours is not None and theirs is not None and not math.isclose(ours, theirs))
        for ours, theirs in pairs
    )

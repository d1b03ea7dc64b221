"""The end of a run: what came of it, in how many seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from services.run.progress import Measure, Progress
from services.run.view import Status, published, sparkline


@dataclass(frozen=True)
class Summary:
    """A run's figures. Seconds count from the command's start; null is what never came."""

    namespace: str
    reason: str
    """Why it ended."""
    seconds: float
    first_step_s: float | None
    """Until the first version was trained; null where that was in an earlier command."""
    learned_s: float | None
    """Until the stop rule's reward was met."""
    versions: dict[str, int]
    """By policy, those at which the stop rule held. The newest published, if no version decided the
    run's end."""
    published: dict[str, int]
    """The newest published, by policy. Later than `versions` if training went on meanwhile."""
    rewards: dict[str, float | None]
    """Mean of the last versions up to `versions`, by policy."""
    curves: dict[str, list[float]]
    """Mean reward of every version, by policy."""
    evaluations: dict[str, object]
    """What each version was measured at, by policy and version."""
    evaluated: dict[str, list[str]]
    """The same in words."""
    tasks: int
    episodes: int
    failures: int
    restarts: int

    @classmethod
    def of(cls, status: Status, namespace: str, reason: str, progress: Progress) -> Summary:
        """The figures as they stand; versions and rewards as the stop rule held."""
        decision = progress.decision(reason)
        versions = progress.versions() if decision is None else dict(decision.versions)
        count = progress.recipe.stop.reward_versions
        return cls(
            namespace=namespace,
            reason=reason,
            seconds=status.elapsed_s(),
            first_step_s=status.since_start_s(progress.first_step_at()),
            learned_s=status.since_start_s(progress.learned_at()),
            versions=versions,
            published=progress.versions(),
            rewards={
                name: policy.reward(count, versions[name])
                for name, policy in progress.policies.items()
            },
            curves={name: policy.curve() for name, policy in progress.policies.items()},
            evaluations=progress.evaluations.to_tree(),
            evaluated={
                name: [
                    f"{version:<4} {one}" for version, one in progress.evaluations.of(name).items()
                ]
                for name in progress.policies
            },
            tasks=progress.tasks_ended,
            episodes=progress.episodes,
            failures=progress.failures,
            restarts=status.restarts,
        )

    def measures(self, progress: Progress) -> dict[Measure, float | None]:
        """What `--check` compares."""
        return {
            "reward": progress.reward(self.versions),
            "versions": progress.version(self.versions),
            "episodes": self.episodes,
            "seconds": self.seconds,
            "failures": self.failures,
            "restarts": self.restarts,
        }

    def to_tree(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.namespace}: ended by {self.reason}"]
        for name, version in self.versions.items():
            reward = self.rewards[name]
            shown = "-" if reward is None else f"{reward:.3f}"
            later = self.published[name]
            lines.append(
                f"  policy {name:<12} version {published(version)}   reward {shown}  "
                f"{sparkline(self.curves[name], 32)}"
                + (f"  version {later} was published later" if later > version else "")
            )
            lines += [f"    evaluated version {line}" for line in self.evaluated.get(name, ())]
        lines += [
            f"  episodes {self.episodes:,} of {self.tasks:,} tasks   failed {self.failures}   "
            f"restarts {self.restarts}",
            f"  seconds: first training step {_seconds(self.first_step_s)}   "
            f"learned {_seconds(self.learned_s)}   in all {self.seconds:.1f}",
        ]
        return lines


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

"""The summary that a run prints at its end."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from headrace.services.operate.run.live_view import Status, policy_line
from headrace.services.operate.run.progress import Measure, Progress


@dataclass(frozen=True)
class Summary:
    """A run's figures.

    Seconds count from the start of the command; None means that the event did not happen.
    """

    namespace: str
    paused: bool
    """Ctrl-C or SIGTERM paused the run, so it has not ended."""
    reason: str
    """Why the run ended. `paused` if it has not."""
    seconds: float
    first_step_s: float | None
    """Until the first version was trained; None if an earlier command did that."""
    learned_s: float | None
    """Until the stop rule's reward was reached."""
    versions: dict[str, int]
    """By policy, the versions at which the stop rule held. If no version decided the run's end, the
    newest published."""
    published: dict[str, int]
    """The newest published, by policy. Later than `versions` if training went on meanwhile."""
    rewards: dict[str, float | None]
    """Mean of the last versions up to `versions`, by policy."""
    curves: dict[str, list[float]]
    """Mean reward of every version of each policy."""
    evaluations: dict[str, object]
    """Evaluation results, by policy and version."""
    evaluated: dict[str, list[str]]
    """The same as text."""
    tasks: int
    episodes: int
    failures: int
    restarts: int
    top_failures: list[str]
    """The most frequent kinds of failures: count, message, and the command that shows one."""
    hints: list[str]

    @classmethod
    def of(cls, status: Status, namespace: str, reason: str | None, progress: Progress) -> Summary:
        """Returns the current figures, but versions and rewards as the stop rule held.

        `reason` is why the run ended; None if it is paused.
        """
        decision = None if reason is None else progress.decision(reason)
        versions = progress.versions() if decision is None else dict(decision.versions)
        count = progress.recipe.stop.reward_versions
        hints = progress.hints()
        if reason is not None and progress.submitted == 0:
            use = progress.recipe.tasks.use
            hints.append(f"no task was submitted: look whether the data set {use!r} has an item")
        return cls(
            namespace=namespace,
            paused=reason is None,
            reason="paused" if reason is None else reason,
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
            top_failures=[str(kind) for kind in progress.endings.top()],
            hints=hints,
        )

    def measures(self, progress: Progress) -> dict[Measure, float | None]:
        """Returns the measures that `--check` compares."""
        return {
            "reward": progress.reward(self.versions),
            "versions": progress.version(self.versions),
            "episodes": self.episodes,
            "seconds": self.seconds,
            "failures": self.failures,
            "restarts": self.restarts,
        }

    def lines(self) -> list[str]:
        """Returns lines for people."""
        lines = [f"{self.namespace}: {'paused' if self.paused else f'ended by {self.reason}'}"]
        for name, version in self.versions.items():
            line = policy_line(name, version, self.rewards[name], self.curves[name])
            later = self.published[name]
            lines.append(
                line + (f"  version {later} was published later" if later > version else "")
            )
            lines += [f"    evaluated version {line}" for line in self.evaluated.get(name, ())]
        lines += [
            f"  episodes {self.episodes:,} of {self.tasks:,} tasks   failed {self.failures}   "
            f"restarts {self.restarts}",
            f"  seconds: first training step {_seconds(self.first_step_s)}   "
            f"learned {_seconds(self.learned_s)}   total {self.seconds:.1f}",
        ]
        lines += [f"  failed: {line}" for line in self.top_failures]
        return lines + [f"  hint: {line}" for line in self.hints]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def command_line() -> str:
    """Returns this command as it is entered in a shell."""
    return shlex.join(["headrace", *sys.argv[1:]])

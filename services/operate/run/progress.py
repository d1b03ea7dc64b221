"""The progress of a run as a pure fold over its events, the stop rule, and `--check`.

The events come from `tasks`, `results`, `batches.*` and `policies`. If `run` is started again on
the same namespace, it folds the same events to the same progress.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from headrace.schemas.events import BatchAssembled, Event, PolicyPublished, TaskEnded, TaskSubmitted
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.evaluation import Evaluations
from headrace.services.operate.run.endings import Endings
from headrace.services.operate.run.training_health import TrainingHealth

RATE_WINDOW_S = 10.0
"""Seconds over which the episodes per second are averaged."""
IDLE_WINDOW_S = 600.0
"""A time of this length without any event, before the command, does not count for `stop.seconds`.
An event is rarely longer away while a run goes on."""


@dataclass
class PolicyProgress:
    """The training of one policy."""

    trained: bool
    version: int = -1
    """Newest published version; -1 before version 0."""
    newest_batch: int = 0
    decided: Frontier = field(default_factory=Frontier)
    """Numbers of the tasks that batches have trained on or dropped."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward of each batch that has one, by version."""
    staleness: int = 0
    """Age of the newest batch's oldest token, in versions."""
    skipped: int = 0
    """Versions that were published without training because of a poison batch."""
    first_step_at: float | None = None
    """When version 1 was published, in epoch seconds."""
    cross_entropy: float | None = None
    """Cross-entropy of the newest version's demonstrated tokens, in nats per token. None if it had
    no such tokens."""
    health: TrainingHealth = field(default_factory=TrainingHealth)
    """The metrics of its newest versions."""

    def reward(self, versions: int, newest: int | None = None) -> float | None:
        """Returns the mean over the last `versions` versions with a reward (None if too few).

        The last of them is at most version `newest`, by default the newest published.
        """
        last = self.version if newest is None else newest
        known = [self.rewards[n] for n in sorted(self.rewards) if n <= last]
        return sum(known[-versions:]) / versions if len(known) >= versions else None

    def curve(self) -> list[float]:
        """Returns the rewards of the published versions, sorted by version."""
        return [self.rewards[n] for n in sorted(self.rewards) if n <= self.version]


@dataclass(frozen=True)
class Decision:
    """A stop rule that held, with the first published versions at which it did.

    Only the log decides it. A second `run` of the same namespace finds the same, even if more was
    published or if it reads the events in another order.
    """

    reason: str
    """The rule, in the words of the run's end."""
    versions: Mapping[str, int]
    """Newest published at that moment, by policy; -1 before version 0."""
    at: float
    """When the last of them was published, in epoch seconds."""


class Progress:
    """Folds events. `now` and all times are epoch seconds."""

    def __init__(self, recipe: Recipe, since: float = 0.0) -> None:
        """`since` is when the command began that asks."""
        self.recipe = recipe
        self.endings = Endings(recipe, since)
        self.policies = {
            name: PolicyProgress(
                trained=policy.training is not None, health=TrainingHealth(recipe.stop.reward)
            )
            for name, policy in recipe.policies.items()
        }
        self.submitted = 0
        self.episodes = 0
        self.failures = 0
        """Episodes that failed for good. The policy is never the cause."""
        measured = recipe.tasks.roles.values() if recipe.tasks.purpose == "evaluate" else ()
        self.evaluations = Evaluations(
            recipe.evaluation.passing if recipe.evaluation is not None else 1.0,
            fixed=[name for name in measured if recipe.policies[name].training is None],
        )
        self._by_reward: Decision | None = None
        self._by_versions: Decision | None = None
        self._by_rate: Decision | None = None
        self._judged = dict.fromkeys(self.policies, -1)
        """The versions at which the stop rule's reward was checked last."""
        self._unjudged: deque[tuple[str, int, float]] = deque()
        """Policy, version and time of the publications after them, in order."""
        self._to_evaluate: list[int] = []
        """Numbers of evaluation tasks, which need no batch."""
        self.newest_task = -1
        self._ended = Frontier()
        self._ends: deque[tuple[float, int]] = deque()
        self._windows: set[int] = set()
        """The windows of IDLE_WINDOW_S since the epoch in which an event was recorded."""

    @property
    def tasks_ended(self) -> int:
        """Number of tasks that have ended."""
        return len(self._ended)

    @property
    def drained(self) -> bool:
        """Whether every submitted task has ended."""
        return self.tasks_ended >= self.submitted

    @property
    def published(self) -> bool:
        """Whether every submitted task has ended and all training on them is published."""
        return self.drained and all(
            self._decided(policy) and policy.version >= policy.newest_batch
            for policy in self.policies.values()
            if policy.trained
        )

    def _decided(self, policy: PolicyProgress) -> bool:
        # The low mark can't be used: a record in `tasks` that is not a task never gets decided, so
        # the low mark stops there.
        early = sum(number in policy.decided for number in self._to_evaluate)
        return len(policy.decided) - early >= self.submitted - len(self._to_evaluate)

    def on_event(self, event: Event, at: float, offset: int) -> None:
        """Adds one event that was recorded at `at`. A repeated event changes nothing."""
        self._windows.add(int(at // IDLE_WINDOW_S))
        match event:
            case TaskSubmitted():
                if offset > self.newest_task:
                    self.newest_task = offset
                    self.submitted += 1
                    if event.purpose == "evaluate":
                        self._to_evaluate.append(offset)
            case TaskEnded():
                self._on_task_ended(event, at)
            case BatchAssembled():
                self._on_batch(event)
            case PolicyPublished():
                self._on_published(event, at)
            case _:
                raise TypeError(f"progress does not follow {type(event).__name__}")

    def _on_task_ended(self, event: TaskEnded, at: float) -> None:
        if not self._ended.add(event.task):
            return
        self.evaluations.on_task_ended(event)
        self.endings.on_task_ended(event, at)
        self.episodes += len(event.outcomes)
        self.failures += sum(outcome.ending == "failed" for outcome in event.outcomes)
        self._ends.append((at, len(event.outcomes)))
        while self._ends[0][0] < at - RATE_WINDOW_S:
            self._ends.popleft()

    def _on_batch(self, batch: BatchAssembled) -> None:
        policy = self.policies.get(batch.policy)
        if policy is None or batch.version <= policy.newest_batch:
            return
        policy.newest_batch = batch.version
        policy.decided = batch.frontier()
        versions = (sample.oldest_version for sample in batch.samples)
        oldest = min((version for version in versions if version >= 0), default=None)
        policy.staleness = 0 if oldest is None else batch.version - 1 - oldest
        if batch.reward_mean is not None:
            policy.rewards[batch.version] = batch.reward_mean
        self._judge_reward()

    def _on_published(self, event: PolicyPublished, at: float) -> None:
        policy = self.policies.get(event.policy)
        if policy is None or event.version <= policy.version:
            return
        policy.version = event.version
        policy.cross_entropy = event.metrics.get("cross_entropy")
        policy.health.on_published(event)
        policy.skipped += event.status == "skipped"
        if event.version >= 1 and policy.first_step_at is None:
            policy.first_step_at = at
        stop = self.recipe.stop
        version = self.version()
        if stop.versions is not None and self._by_versions is None and version >= stop.versions:
            self._by_versions = Decision(f"version {version} published", self.versions(), at)
        trained = self._trained().values()
        if self._by_rate is None and trained and all(one.health.learned_out for one in trained):
            self._by_rate = Decision(f"learning rate 0 at version {version}", self.versions(), at)
        if stop.reward is not None and self._by_reward is None:
            self._unjudged.append((event.policy, event.version, at))
            self._judge_reward()

    def _judge_reward(self) -> None:
        """Checks for every published version in turn whether the stop rule's reward is met.

        It waits for the version's batch, which has the reward and comes from another partition.
        """
        stop = self.recipe.stop
        while self._unjudged:
            name, version, at = self._unjudged[0]
            if self.policies[name].newest_batch < version:
                return
            self._unjudged.popleft()
            self._judged[name] = version
            reward = self.reward(self._judged)
            if reward is not None and stop.reward is not None and reward >= stop.reward:
                reason = f"reward {reward:.3f} over {stop.reward_versions} versions"
                self._by_reward = Decision(reason, self._judged, at)
                self._unjudged.clear()

    def hints(self) -> list[str]:
        """Returns what people should look at: how episodes end, and metrics out of their range."""
        hints = self.endings.hints()
        several = len(self._trained()) > 1
        for name, policy in self._trained().items():
            advice = policy.health.advice(limits_known=self.endings.reach_limits)
            hints += [f"{name}: {one}" if several else one for one in advice.values()]
        return hints

    def episodes_per_s(self, now: float) -> float:
        """Returns the mean over the last 10 s."""
        return sum(n for at, n in self._ends if at >= now - RATE_WINDOW_S) / RATE_WINDOW_S

    def idle_s(self, since: float, until: float) -> float:
        """Returns the seconds in whole windows between two times in which nothing was recorded."""
        windows = range(int(since // IDLE_WINDOW_S) + 1, int(until // IDLE_WINDOW_S))
        return IDLE_WINDOW_S * sum(window not in self._windows for window in windows)

    def versions(self) -> dict[str, int]:
        """Returns each policy's newest published version; -1 before version 0."""
        return {name: policy.version for name, policy in self.policies.items()}

    def version(self, versions: Mapping[str, int] | None = None) -> int:
        """Returns the lowest of the trained policies' versions, by default of the newest ones.

        -1 if one has no version, or no policy is trained.
        """
        at = self.versions() if versions is None else versions
        return min((at[name] for name in self._trained()), default=-1)

    def reward(self, versions: Mapping[str, int] | None = None) -> float | None:
        """Returns the trained policies' lowest reward at these versions, by default the newest.

        None if a policy has no reward yet.
        """
        at = self.versions() if versions is None else versions
        count = self.recipe.stop.reward_versions
        rewards = [policy.reward(count, at[name]) for name, policy in self._trained().items()]
        known = [reward for reward in rewards if reward is not None]
        return min(known) if known and len(known) == len(rewards) else None

    def first_step_at(self) -> float | None:
        """Returns when the first policy was first trained, or None before that."""
        times = (policy.first_step_at for policy in self._trained().values())
        return min((at for at in times if at is not None), default=None)

    def learned_at(self) -> float | None:
        """Returns when the stop rule's reward was first met, or None."""
        return None if self._by_reward is None else self._by_reward.at

    def stop_reason(self, *, seconds: float, exhausted: bool) -> str | None:
        """Returns why the run ends now, or None. `exhausted` means that no more tasks will come."""
        for decision in self._decisions():
            return decision.reason
        stop = self.recipe.stop
        if stop.seconds is not None and seconds >= stop.seconds:
            return f"{stop.seconds:g} seconds"
        if exhausted and self.published:
            return "all tasks published"
        return None

    def decision(self, reason: str) -> Decision | None:
        """Returns the decision that ended a run for `reason`; None if no version decided that."""
        return next((one for one in self._decisions() if one.reason == reason), None)

    def _decisions(self) -> list[Decision]:
        decisions = (self._by_reward, self._by_versions, self._by_rate)
        return [one for one in decisions if one is not None]

    def _trained(self) -> dict[str, PolicyProgress]:
        return {name: policy for name, policy in self.policies.items() if policy.trained}


Measure = Literal["reward", "versions", "episodes", "seconds", "failures", "restarts"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_CHECK = re.compile(r"\s*(\w+)\s*(>=|<=|==|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Check:
    """A condition on the end of a run, for example `reward>=0.95`."""

    text: str
    measure: Measure
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Check:
        """Parses a check. Raises ValueError, which says how to write a check."""
        match = _CHECK.fullmatch(text)
        if match is None or match[1] not in MEASURES:
            raise ValueError(
                f"{text!r}: a check is one of {', '.join(MEASURES)}, then >=, <=, ==, > or <, "
                "then a number, for example reward>=0.95"
            )
        try:
            bound = float(match[3])
        except ValueError:
            raise ValueError(f"{text!r}: {match[3]!r} is not a number") from None
        return cls(text, cast(Measure, match[1]), match[2], bound)

    def holds(self, value: float | None) -> bool:
        """Returns whether a value meets the check. None, a missing measure, meets no check."""
        return value is not None and _COMPARISONS[self.comparison](value, self.bound)


def violations(checks: Sequence[Check], measures: Mapping[Measure, float | None]) -> list[str]:
    """Returns one line for each check that does not hold."""
    return [
        f"{check.text} does not hold: {check.measure} is "
        + ("absent" if (value := measures[check.measure]) is None else f"{value:g}")
        for check in checks
        if not check.holds(measures[check.measure])
    ]

"""Reads the curves of a run from its log."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.schemas.events import BatchAssembled, PolicyPublished, TaskEnded
from headrace.schemas.topics import BATCHES, POLICIES, RESULTS
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.operate.evaluation import Estimate, Evaluations


@dataclass(slots=True)
class RunCurves:
    """The curves of one policy."""

    namespace: str
    policy: str
    published: dict[int, tuple[float, PolicyPublished]] = field(default_factory=dict)
    """By version: when it was published first, in seconds since the epoch, and its record."""
    tokens: dict[int, int] = field(default_factory=dict)
    """By version: the sampled tokens of its batch."""
    evaluations: dict[int, Estimate] = field(default_factory=dict)
    """By version: avg@k with its 95 % interval."""

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Returns (version, value) for the versions that have the metric, ascending."""
        return [
            (version, one.metrics[name])
            for version, (_, one) in sorted(self.published.items())
            if name in one.metrics
        ]

    def waiting(self) -> list[tuple[int, float]]:
        """Returns (version, share): how much of its time the trainer waited for the batch."""
        return [
            (version, one.wait_s / (one.wait_s + one.step_s))
            for version, (_, one) in sorted(self.published.items())
            if one.wait_s + one.step_s > 0
        ]

    def throughput(self) -> list[tuple[int, float]]:
        """Returns (version, tokens a second): the batch's tokens by the time since the version
        before. A pause of the run counts as time."""
        points = []
        for version, (at, _) in sorted(self.published.items()):
            before = self.published.get(version - 1)
            if before is not None and version in self.tokens and at > before[0]:
                points.append((version, self.tokens[version] / (at - before[0])))
        return points


async def read_curves(log: EventLog, policy: str, passing: float) -> RunCurves:
    """Reads the curves of a policy. `passing` is the reward of a solved sample in evaluations."""
    topics = log.topics
    curves, evaluations = RunCurves(topics.namespace, policy), Evaluations(passing)
    ranges = dict.fromkeys(topics.partitions_of(RESULTS), WHOLE)
    ranges |= {topics.partition(POLICIES): WHOLE, topics.partition(BATCHES, policy): WHOLE}
    ended = set[int]()
    async with aclosing(read_events(log, ranges)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                # The first record of a version has the metrics of its training.
                curves.published.setdefault(event.version, (delivery.recorded_at, event))
            elif isinstance(event, BatchAssembled):
                curves.tokens.setdefault(event.version, event.sampled_tokens)
            elif isinstance(event, TaskEnded) and event.task not in ended:
                ended.add(event.task)
                evaluations.on_task_ended(event)
    for version, result in evaluations.of(policy).items():
        if result.average is not None:
            curves.evaluations[version] = result.average
    return curves

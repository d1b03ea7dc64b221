"""Trains a policy anew on trajectories that a run recorded, by another recipe.

The recorded results go through the cores of both stream jobs, in the order in which they were
recorded, and the trainer trains on the batches that come of it. Nothing is generated: rewards and
trajectories are those of the recorded run, whoever's policy they were.

Two rules take the clock's place, since in a replay nothing waits and every sample is old.
A sample is as stale as it was when the recorded run decided it. A batch is short only at the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import HeadraceError, RecordsLost, UsageError
from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES
from headrace.services.kafka.broker import FencedWriter
from headrace.services.log.event_log import EventLog
from headrace.services.models.tokens import tokenizer_digest
from headrace.services.models.weights import model_folder
from headrace.services.operate.replay.rebuilder import as_published, decided_by
from headrace.services.operate.replay.recording import (
    Progress,
    Recording,
    Results,
    chunks,
    make_fresh,
    read_results,
    read_topic,
)
from headrace.services.operate.replay.replay_training import ended_after, train
from headrace.stream_jobs import assemble_batches
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.groups import GroupAssembler

CHANGEABLE = tuple(
    f"policies.*.{part}" for part in ("groups", "batches", "training", "seed", "model", "dtype")
)
"""What a replay of trajectories does anew."""
NEVER, ALWAYS = float("-inf"), float("inf")


@dataclass
class Assembled:
    """What became of one policy's groups."""

    groups: int = 0
    scored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Whole groups, and single samples, by reason."""
    sizes: list[int] = field(default_factory=list)
    """Samples of batch 1, 2, …"""
    versions: list[PolicyPublished] = field(default_factory=list)

    @property
    def batches(self) -> int:
        """How many batches came of the groups."""
        return len(self.sizes)


@dataclass
class TrajectoriesReplayed:
    """A replay over recorded trajectories."""

    namespace: str
    policies: dict[str, Assembled]

    def to_tree(self) -> dict[str, Any]:
        """The policies, for JSON."""
        return {
            name: {
                "groups": one.groups,
                "scored": one.scored,
                "dropped": dict(one.dropped),
                "versions": [
                    {
                        "version": version.version,
                        "status": version.status,
                        "samples": samples,
                        "digest": version.digest.hex(),
                        "metrics": version.metrics,
                    }
                    for version, samples in zip(one.versions, [0, *one.sizes], strict=True)
                ],
            }
            for name, one in self.policies.items()
        }


def check_tokenizers(recorded: Recipe, recipe: Recipe) -> None:
    """UsageError where a policy's model has other token ids than those that are recorded."""
    for name, policy in recipe.policies.items():
        was = recorded.policies[name].model
        if policy.model != was and tokenizer_digest(model_folder(policy.model)) != tokenizer_digest(
            model_folder(was)
        ):
            raise UsageError(
                f"policies.{name}.model: {policy.model} has another tokenizer than {was}, whose "
                "token ids are recorded"
            )


async def replay_trajectories(
    recording: Recording,
    recipe: Recipe,
    policy: str | None,
    *,
    tasks: tuple[int, int | None],
    into: str | None,
    say: Callable[[str], None],
    progress: Progress,
) -> TrajectoriesReplayed:
    """Trains `policy`, or each one that trains, on the results of a range of tasks.

    The range has both ends; None is the last task.
    """
    check_tokenizers(recording.recipe, recipe)
    policies = [name for name, one in recipe.policies.items() if one.training is not None]
    if not policies or policy not in (None, *policies):
        raise UsageError(f"no policy {policy!r} trains, but {', '.join(policies) or 'none'}")
    chosen = policies if policy is None else [policy]
    results = await read_results(recording.log)
    order = _choose(recording.namespace, results, *tasks)
    stood = {name: await _stood_at(recording, name, order) for name in chosen}
    log = await make_fresh(recording, into, recipe)
    say(f"into namespace {log.topics.namespace}")
    reason = f"trajectories of {len(order)} tasks replayed"
    async with ended_after(log, recipe, reason):
        job = Assembly(log, recipe, stood)
        assembled = await job.run(results, order, progress)
        for name, one in assembled.items():
            if not one.batches:
                raise HeadraceError(
                    f"no batch came of {one.groups} groups of {name}: {_reasons(one.dropped)}"
                )
            await _train(log, recipe, recording, name, one, progress)
    return TrajectoriesReplayed(log.topics.namespace, assembled)


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in dropped.most_common()) or "empty"


def _choose(namespace: str, results: Results, first: int, last: int | None) -> list[int]:
    """The tasks in the order of their results. RecordsLost where their trajectories are gone."""
    end = float("inf") if last is None else last
    tasks = sorted(
        (task for task in results.places if first <= task <= end),
        key=lambda task: results.places[task],
    )
    if not tasks:
        there = f"{min(results.places)} to {max(results.places)}" if results.places else "none"
        raise UsageError(
            f"{namespace} has no ended task from {first} to {'the last' if last is None else last};"
            f" it has {there}. A replay's own namespace has none: replay what it came from"
        )
    bare = [task for task in results.bare if first <= task <= end]
    if bare:
        raise RecordsLost(
            f"the trajectories of {len(bare)} of {len(tasks)} tasks are no longer kept, the last "
            f"of them task {bare[-1]}: replay what is left with --tasks {bare[-1] + 1}-"
        )
    return tasks


async def _stood_at(recording: Recording, policy: str, tasks: Sequence[int]) -> dict[int, int]:
    """The version at which the recorded trainer stood when it decided each task.

    A task that it never decided would have come next.
    """
    found: dict[int, int] = {}
    newest = 0
    async with aclosing(read_topic(recording.log, BATCHES, policy)) as deliveries:
        async for delivery in deliveries:
            batch = delivery.event
            if isinstance(batch, BatchAssembled):
                newest = max(newest, batch.version)
                for task in decided_by(batch):
                    found.setdefault(task, batch.version - 1)
    return {task: found.get(task, newest) for task in tasks}


class Assembly:
    """Both stream jobs over recorded results, one result after the other."""

    def __init__(
        self, log: EventLog, recipe: Recipe, stood: Mapping[str, Mapping[int, int]]
    ) -> None:
        """`stood` has, of each policy, the version at which each task was decided."""
        self._log = log
        self._groups = GroupAssembler(recipe)
        self._assemblers = {
            policy: BatchAssembler(recipe, policy, tasks) for policy, tasks in stood.items()
        }
        self._assembled = {policy: Assembled() for policy in stood}

    async def run(
        self, results: Results, tasks: Sequence[int], progress: Progress
    ) -> dict[str, Assembled]:
        """Writes the groups and batches of these tasks."""
        writers = {}
        for policy in self._assemblers:
            name = f"{self._log.topics.namespace}.{assemble_batches.SERVICE}.{policy}"
            writers[policy] = await self._log.broker.fenced(name)
            self._assemblers[policy].on_policy(as_published(policy, 0))
        try:
            done = 0
            for chunk in chunks(tasks):
                await self._close(await self._make_groups(results, chunk), writers)
                done += len(chunk)
                progress("tasks assembled", done, len(tasks))
            for policy, writer in writers.items():
                await self._write_due(policy, writer, ALWAYS)
        finally:
            for writer in writers.values():
                await writer.close()
        return self._assembled

    async def _make_groups(self, results: Results, tasks: Sequence[int]) -> list[GroupClosed]:
        groups: list[GroupClosed] = []
        for result in await results.fetch(tasks):
            groups += self._groups.on_task(result.event, round(result.recorded_at * 1000))
        return [group for group in groups if group.policy in self._assemblers]

    async def _close(
        self, groups: Sequence[GroupClosed], writers: Mapping[str, FencedWriter]
    ) -> None:
        refs = await asyncio.gather(*(self._log.send(group) for group in groups))
        for group, ref in zip(groups, refs, strict=True):
            one = self._assembled[group.policy]
            one.groups += 1
            one.scored += group.verdict == "scored"
            self._assemblers[group.policy].on_group(group, ref.offset)
            # One by one: what a batch is made of must not hang on how results are fetched.
            await self._write_due(group.policy, writers[group.policy], NEVER)

    async def _write_due(self, policy: str, writer: FencedWriter, now_s: float) -> None:
        assembler, one = self._assemblers[policy], self._assembled[policy]
        while (batch := assembler.next_batch(now_s)) is not None:
            await self._log.send_all(writer, [batch])
            assembler.on_batch(batch)
            assembler.on_policy(as_published(policy, batch.version))
            one.sizes.append(len(batch.samples))
            one.dropped.update(drop.reason for drop in batch.dropped)


async def _train(
    log: EventLog,
    recipe: Recipe,
    recording: Recording,
    policy: str,
    one: Assembled,
    progress: Progress,
) -> None:
    def on_version(published: PolicyPublished) -> None:
        one.versions.append(published)
        progress("versions trained", published.version, one.batches)

    await train(log, recipe, recording.cluster, policy, until=one.batches, on_version=on_version)

"""Trains a policy on trajectories that a run recorded, with another recipe.

The recorded results go through the cores of both stream jobs in the order in which they were
recorded, and the trainer trains on the resulting batches. Nothing is generated: the rewards and
trajectories are those of the recorded run and its policies.

In a replay nothing waits and every sample is old, so two rules replace the clock. A sample is as
stale as it was when the recorded run decided it. Only the last batch may be short.
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
    TaskRange,
    chunks,
    make_fresh,
    read_results,
    read_topic,
    trained_policies,
)
from headrace.services.operate.replay.replay_training import ended_after, train
from headrace.stream_jobs import assemble_batches
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.groups import GroupAssembler

CHANGEABLE = tuple(
    f"policies.*.{part}" for part in ("groups", "batches", "training", "seed", "model", "dtype")
)
"""The keys of the recipe that a replay of trajectories may change."""
NEVER, ALWAYS = float("-inf"), float("inf")


@dataclass
class Assembled:
    """The batches that one policy's groups gave, and the versions trained on them."""

    groups: int = 0
    scored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Whole groups and single samples, by reason."""
    sizes: list[int] = field(default_factory=list)
    """The numbers of samples of batch 1, 2, …."""
    versions: list[PolicyPublished] = field(default_factory=list)

    def trained(self) -> list[tuple[PolicyPublished, int]]:
        """Returns each version with its batch's number of samples. Version 0 has no batch."""
        return list(zip(self.versions, [0, *self.sizes], strict=True))


@dataclass
class TrajectoriesReplayed:
    """The result of a replay of trajectories."""

    namespace: str
    policies: dict[str, Assembled]

    def to_tree(self) -> dict[str, Any]:
        """Returns the policies as JSON values."""
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
                    for version, samples in one.trained()
                ],
            }
            for name, one in self.policies.items()
        }


def check_tokenizers(recorded: Recipe, recipe: Recipe) -> None:
    """Raises UsageError if a policy's model has other token ids than those that are recorded."""
    for name, policy in recipe.policies.items():
        was = recorded.policies[name].model
        if policy.model != was and tokenizer_digest(model_folder(policy.model)) != tokenizer_digest(
            model_folder(was)
        ):
            raise UsageError(
                f"policies.{name}.model: {policy.model} has another tokenizer than {was}, whose "
                "token ids are recorded. Choose a model with the same tokenizer"
            )


async def replay_trajectories(
    recording: Recording,
    recipe: Recipe,
    policy: str | None,
    *,
    tasks: TaskRange,
    into: str | None,
    say: Callable[[str], None],
    progress: Progress,
) -> TrajectoriesReplayed:
    """Trains `policy`, or all policies of the recipe that are trained, on these tasks' results.

    Raises UsageError if there is no such policy or task, RecordsLost if a trajectory is no longer
    kept, and HeadraceError if the results give no batch.
    """
    check_tokenizers(recording.recipe, recipe)
    chosen = trained_policies(recipe, policy)
    results = await read_results(recording.log)
    order = _choose(recording.namespace, results, tasks)
    decided_at = {name: await _decided_at(recording, name, order) for name in chosen}
    log = await make_fresh(recording, into, recipe)
    say(f"into namespace {log.topics.namespace}")
    reason = f"trajectories of {len(order)} tasks replayed"
    async with ended_after(log, recipe, reason):
        assembled = await Assembly(log, recipe, decided_at).run(results, order, progress)
        for name, one in assembled.items():
            if not one.sizes:
                dropped = ", ".join(f"{reason} {n}" for reason, n in one.dropped.most_common())
                raise HeadraceError(
                    f"the {one.groups} groups of policy {name} gave no batch. Dropped: "
                    f"{dropped or 'nothing'}. Check policies.{name}.groups and .batches"
                )
            await _train(log, recipe, recording, name, one, progress)
    return TrajectoriesReplayed(log.topics.namespace, assembled)


def _choose(namespace: str, results: Results, wanted: TaskRange) -> list[int]:
    """Returns the wanted tasks in the order of their results.

    Raises UsageError if there is none, and RecordsLost if a trajectory is no longer kept.
    """
    locations = results.locations
    tasks = sorted((task for task in locations if task in wanted), key=lambda one: locations[one])
    if not tasks:
        ended = f"are {min(locations)} to {max(locations)}" if locations else "don't exist yet"
        raise UsageError(
            f"{namespace} has no ended task from {wanted}: its ended tasks {ended}. The namespace "
            "of a replay has no results of its own; replay the recorded run instead"
        )
    incomplete = [task for task in results.incomplete if task in wanted]
    if incomplete:
        raise RecordsLost(
            f"the trajectories of {len(incomplete)} of {len(tasks)} tasks are no longer kept. The "
            f"last of them is task {incomplete[-1]}: replay the later tasks with --tasks "
            f"{incomplete[-1] + 1}-"
        )
    return tasks


async def _decided_at(recording: Recording, policy: str, tasks: Sequence[int]) -> dict[int, int]:
    """Returns the version that the recorded trainer had when it decided each task.

    A task that it never decided gets the newest version, as if it came next.
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
    """Runs both stream jobs over recorded results, one result after the other."""

    def __init__(
        self, log: EventLog, recipe: Recipe, decided_at: Mapping[str, Mapping[int, int]]
    ) -> None:
        """`decided_at` maps each policy and task to the version at which it was decided."""
        self._log = log
        self._groups = GroupAssembler(recipe)
        self._assemblers = {
            policy: BatchAssembler(recipe, policy, tasks) for policy, tasks in decided_at.items()
        }
        self._assembled = {policy: Assembled() for policy in decided_at}

    async def run(
        self, results: Results, tasks: Sequence[int], progress: Progress
    ) -> dict[str, Assembled]:
        """Writes the groups and batches of these tasks, and returns what each policy got."""
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
            # After each group: the batches must not depend on how many results a fetch returns.
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
        progress("versions trained", published.version, len(one.sizes))

    await train(log, recipe, recording.cluster, policy, until=len(one.sizes), on_version=on_version)

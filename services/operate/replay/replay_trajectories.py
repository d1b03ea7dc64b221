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
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import HeadraceError, RecordsLost, UsageError
from headrace.schemas.events import GroupClosed, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES
from headrace.services.kafka.broker import FencedWriter
from headrace.services.log.event_log import EventLog
from headrace.services.models.tokens import tokenizer_digest
from headrace.services.models.weights import model_folder
from headrace.services.operate.replay.rebuilder import as_published, decided_by
from headrace.services.operate.replay.recording import (
    Recording,
    Results,
    TaskRange,
    chunks,
    make_fresh,
    read_publications,
    read_results,
    read_topic,
    reading_recorded,
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
) -> TrajectoriesReplayed:
    """Trains `policy`, or all policies of the recipe that are trained, on these tasks' results.

    Raises UsageError if there is no such policy or task, RecordsLost if a trajectory is no longer
    kept, and HeadraceError if the results give no batch.
    """
    check_tokenizers(recording.recipe, recipe)
    recipe = reading_recorded(recording, recipe)
    chosen = trained_policies(recipe, policy)
    results = await read_results(recording.log)
    order = _choose(recording.namespace, results, tasks)
    decided_at = {name: await _decided_at(recording, name, order) for name in chosen}
    skipped = {name: await _skipped(recording, name) for name in chosen}
    log = await make_fresh(recording, into, recipe)
    reason = f"trajectories of {len(order)} tasks replayed"
    async with ended_after(log, recipe, reason):
        assembled = await assemble(recording, log, recipe, results, order, decided_at, skipped)
        for name, one in assembled.items():
            if not one.sizes:
                dropped = ", ".join(f"{reason} {n}" for reason, n in one.dropped.most_common())
                raise HeadraceError(
                    f"the {one.groups} groups of policy {name} gave no batch. Dropped: "
                    f"{dropped or 'nothing'}. Check policies.{name}.groups and .batches"
                )
            one.versions = await train(recording, log, recipe, name, until=len(one.sizes))
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
            newest = max(newest, batch.version)
            for task in decided_by(batch):
                found.setdefault(task, batch.version - 1)
    return {task: found.get(task, newest) for task in tasks}


async def _skipped(recording: Recording, policy: str) -> set[int]:
    published = await read_publications(recording.log, policy)
    return {version for version, one in published.items() if one.status == "skipped"}


async def assemble(
    recording: Recording,
    log: EventLog,
    recipe: Recipe,
    results: Results,
    tasks: Sequence[int],
    decided_at: Mapping[str, Mapping[int, int]],
    skipped: Mapping[str, Collection[int]],
) -> dict[str, Assembled]:
    """Runs both stream jobs over the results of these tasks, one result after the other.

    `decided_at` maps each policy and task to the version at which it was decided, and `skipped`
    each policy to the versions that the recorded run skipped. Writes the groups and batches to
    `log`, and returns what each policy got.
    """
    group_assembler = GroupAssembler(recipe)
    async with AsyncExitStack() as stack:
        assemblies: dict[str, _Assembly] = {}
        for policy, versions in decided_at.items():
            name = f"{log.topics.namespace}.{assemble_batches.SERVICE}.{policy}"
            writer = await log.broker.fenced(name)
            stack.push_async_callback(writer.close)
            assembler = BatchAssembler(recipe, policy, versions, skipped[policy])
            assembler.on_policy(as_published(policy, 0))
            assemblies[policy] = _Assembly(log, writer, assembler)
        done = 0
        for chunk in chunks(tasks):
            groups = [
                group
                for result in await results.fetch(chunk)
                for group in group_assembler.on_task(result.event, round(result.recorded_at * 1000))
                if group.policy in assemblies
            ]
            refs = await asyncio.gather(*(log.send(group) for group in groups))
            for group, ref in zip(groups, refs, strict=True):
                await assemblies[group.policy].on_group(group, ref.offset)
            done += len(chunk)
            recording.progress("tasks assembled", done, len(tasks))
        for assembly in assemblies.values():
            await assembly.write_due(ALWAYS)
    return {policy: assembly.assembled for policy, assembly in assemblies.items()}


@dataclass
class _Assembly:
    """Writes one policy's batches as soon as they are due."""

    log: EventLog
    writer: FencedWriter
    assembler: BatchAssembler
    assembled: Assembled = field(default_factory=Assembled)

    async def on_group(self, group: GroupClosed, offset: int) -> None:
        self.assembled.groups += 1
        self.assembled.scored += group.verdict == "scored"
        self.assembler.on_group(group, offset)
        # After each group: the batches must not depend on how many results a fetch returns.
        await self.write_due(NEVER)

    async def write_due(self, now_s: float) -> None:
        while (batch := self.assembler.next_batch(now_s)) is not None:
            await self.log.send_all(self.writer, [batch])
            self.assembler.on_batch(batch)
            self.assembler.on_policy(as_published(batch.policy, batch.version))
            self.assembled.sizes.append(len(batch.samples))
            self.assembled.dropped.update(drop.reason for drop in batch.dropped)

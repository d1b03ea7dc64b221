"""Answers `headrace show ID`: finds the facts, and has them told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.errors import UsageError
from headrace.schemas.events import BatchAssembled, Event, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.scan import Patience, fetch_each, scan
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.namespace_topics import find_topic
from headrace.services.operate.readable import readable_record
from headrace.services.operate.show.facts import Fact
from headrace.services.operate.show.gather import Gatherer, only_policy
from headrace.services.operate.show.ids import Id, RecordId, SourceId, StepId, TaskId, parse_id
from headrace.services.operate.show.pages import Part, record_page, step_page, task_page
from headrace.services.operate.show.step_story import (
    StepStory,
    TrainedSample,
    tell_sample,
    tell_step,
)
from headrace.services.operate.show.task_story import TaskStory, tell_task
from headrace.services.operate.show.unpacked import Texts


class Story(Protocol):
    """What there is to show."""

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""

    def page(self) -> list[Part]:
        """For people."""


async def find_story(cluster: ClusterConfig, text: str, tell: Callable[[str], None]) -> Story:
    """The story of what `text` names. UsageError where there is no such thing.

    `tell` hears how far the reading is, where it takes a while.
    """
    wanted = parse_id(text)
    async with open_namespace(cluster, "show") as (log, life):
        finder = _Finder(log, life.recipe(), cluster.open_blobs(), Patience(tell))
        return await finder.find(wanted)


@dataclass(frozen=True)
class _Finder:
    log: EventLog
    recipe: Recipe
    blobs: BlobStore
    patience: Patience

    async def find(self, wanted: Id) -> Story:
        gatherer = Gatherer(self.log, self.patience)
        match wanted:
            case TaskId(number, sample):
                return await self._task(gatherer, number, sample)
            case SourceId(source_and_id):
                return await self._task(gatherer, await gatherer.number_of(source_and_id), None)
            case StepId():
                return await self._step(gatherer, wanted)
            case RecordId():
                return await self._record(wanted)

    async def _task(self, gatherer: Gatherer, number: int, sample: int | None) -> Story:
        story = tell_task(number, await gatherer.task(number, sample), sample)
        story.remarks += gatherer.remarks
        if sample is not None and not story.episodes:
            raise UsageError(
                f"task {number} has no episode {sample}: `headrace show {number}` shows those that "
                "it has"
            )
        return _TaskAnswer(story, Texts(self.recipe), sample is not None)

    async def _step(self, gatherer: Gatherer, wanted: StepId) -> Story:
        policy = only_policy(self.log.topics.policies, wanted.policy)
        batch = await gatherer.batch(policy, wanted.version) if wanted.version else None
        since = 0.0 if batch is None else batch.recorded_at
        facts = [batch] if batch is not None else []
        async for published in gatherer.publications(policy, wanted.version, since):
            facts.append(published)
        if not facts or (wanted.kind == "batch" and batch is None):
            raise UsageError(
                f"no {wanted.kind} {wanted.version} of policy {policy}: `headrace status` shows "
                "its newest version, and batches begin at 1"
            )
        samples: list[TrainedSample] = []
        if batch is not None:
            event = batch.event
            assert isinstance(event, BatchAssembled)
            refs = [sample.trajectory for sample in event.samples]
            async for trajectory in fetch_each(self.log, refs):
                samples.append(tell_sample(event, len(samples), trajectory))
        evaluation = None
        # It may have been published again since; what measured it came after the first time.
        published_at = min(
            (fact.recorded_at for fact in facts if isinstance(fact.event, PolicyPublished)),
            default=None,
        )
        if wanted.kind == "version" and published_at is not None:
            measured = self.recipe.evaluation
            evaluation = await gatherer.evaluation(
                policy,
                wanted.version,
                published_at,
                measured.passing if measured is not None else 1.0,
            )
        weights = await asyncio.to_thread(self._weights, facts)
        return _StepAnswer(
            tell_step(policy, wanted.version, facts, samples, weights, evaluation),
            gatherer.remarks,
        )

    def _weights(self, facts: list[Fact[Event]]) -> dict[str, bool]:
        """Whether each publication's weights are in the blob store."""
        published = [fact.event for fact in facts if isinstance(fact.event, PolicyPublished)]
        blobs = [one.full for one in published if one.full is not None]
        blobs += [delta.blob for one in published for delta in one.deltas]
        blobs += [one.adapter.base for one in published if one.adapter is not None]
        return {blob.sha256.hex(): self.blobs.holds(blob) for blob in blobs}

    async def _record(self, wanted: RecordId) -> Story:
        topic = find_topic(self.log.topics, wanted.topic)
        place = Partition(topic.name, wanted.partition)
        if wanted.partition >= topic.partitions:
            raise UsageError(f"{topic.name} has {topic.partitions} partitions, from 0")
        at = (wanted.offset, wanted.offset + 1)
        async with aclosing(scan(self.log.broker, {place: at}, self.patience)) as records:
            async for record in records:
                return _RecordAnswer(await readable_record(self.log, record))
        first, end = (await self.log.broker.ends([place]))[place]
        raise UsageError(
            f"{topic.name}/{wanted.partition} has no record at offset {wanted.offset}: it holds "
            f"{first} to {end - 1}, with gaps where transactions end"
        )


@dataclass(frozen=True)
class _TaskAnswer:
    story: TaskStory
    texts: Texts
    whole: bool
    """One episode alone, with all its exchanges."""

    def to_tree(self) -> dict[str, Any]:
        return self.story.to_tree()

    def page(self) -> list[Part]:
        return task_page(self.story, self.texts.of, whole=self.whole)


@dataclass(frozen=True)
class _StepAnswer:
    story: StepStory
    remarks: list[str]

    def to_tree(self) -> dict[str, Any]:
        return {**self.story.to_tree(), "remarks": self.remarks}

    def page(self) -> list[Part]:
        return [*step_page(self.story), *(f"  remark      {line}" for line in self.remarks)]


@dataclass(frozen=True)
class _RecordAnswer:
    tree: dict[str, Any]

    def to_tree(self) -> dict[str, Any]:
        return self.tree

    def page(self) -> list[Part]:
        return record_page(self.tree)

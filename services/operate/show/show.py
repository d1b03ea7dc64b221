"""Answers `headrace show ID`: finds the facts and makes a story of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience, read_records
from headrace.services.log.unpacked import Texts
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.namespace_topics import find_topic
from headrace.services.operate.options import say
from headrace.services.operate.readable import readable_record
from headrace.services.operate.show.facts import Fact, of_type, story_tree
from headrace.services.operate.show.gather import Gatherer, only_policy
from headrace.services.operate.show.ids import (
    LabelId,
    RecordId,
    SourceId,
    StepId,
    TaskId,
    parse_id,
)
from headrace.services.operate.show.pages import Part, record_page
from headrace.services.operate.show.step_page import step_page
from headrace.services.operate.show.step_story import StepStory, TrainedSample, make_sample
from headrace.services.operate.show.task_page import task_page, tasks_page
from headrace.services.operate.show.task_story import TaskStory, make_task_story
from headrace.services.tasks.artifact_store import write_artifacts


@dataclass(frozen=True)
class Story:
    """The story of one thing."""

    to_tree: Callable[[], dict[str, Any]]
    """Returns it as JSON values."""
    page: Callable[[], list[Part]]
    """Returns it as lines and tables for people."""
    fetched: Sequence[Path] = ()
    """The files that were written."""


async def find_story(cluster: ClusterConfig, text: str, folder: Path | None = None) -> Story:
    """Finds the story of the thing that has the id `text`.

    With `folder`, it writes the files of a task there. Reports the progress on stderr if the
    reading takes long. Raises UsageError if there is no such thing, or if it has no files, and
    BlobError if the blob store does not have a file.
    """
    wanted = parse_id(text)
    async with open_namespace(cluster, "show") as (log, life):
        gatherer = Gatherer(log, Patience(say))
        finder = _Finder(log, life.recipe(), cluster.open_blobs(None), gatherer, folder)
        if folder is not None and not isinstance(wanted, TaskId | SourceId):
            raise UsageError(f"--fetch: {text} has no files; only tasks and episodes have")
        match wanted:
            case TaskId(number, sample):
                return await finder.task(number, sample)
            case SourceId(source_and_id):
                return await finder.task(await gatherer.number_of(source_and_id), None)
            case LabelId(name, value):
                tasks = await gatherer.labelled(name, value)
                return Story(
                    lambda: {"tasks": story_tree(tasks), "remarks": gatherer.remarks},
                    lambda: tasks_page(text, tasks, gatherer.remarks),
                )
            case StepId():
                return await finder.step(wanted)
            case RecordId():
                return await finder.record(wanted)


@dataclass(frozen=True)
class _Finder:
    log: EventLog
    recipe: Recipe
    blobs: BlobStore
    gatherer: Gatherer
    folder: Path | None

    async def task(self, number: int, sample: int | None) -> Story:
        story = make_task_story(number, await self.gatherer.task(number, sample), sample)
        story.remarks += self.gatherer.remarks
        if sample is not None and not story.episodes:
            raise UsageError(
                f"task {number} has no episode {sample}. `headrace show {number}` shows its "
                "episodes"
            )
        texts = Texts(self.recipe)
        fetched: Sequence[Path] = ()
        if self.folder is not None:
            fetched = await asyncio.to_thread(self._fetch, story, sample is None, self.folder)
        return Story(
            lambda: story_tree(story),
            lambda: task_page(story, texts.of, whole=sample is not None),
            fetched,
        )

    def _fetch(self, story: TaskStory, whole: bool, folder: Path) -> list[Path]:
        """Writes the files of a task, or of one episode. Returns them."""
        written: list[Path] = []
        if whole and story.submitted is not None:
            artifacts = story.submitted.event.artifacts
            written += write_artifacts(self.blobs, artifacts, folder / "in").values()
        for episode in story.episodes:
            if episode.outcome is not None:
                artifacts = episode.outcome.event.artifacts
                into = folder / str(episode.sample)
                written += write_artifacts(self.blobs, artifacts, into).values()
        if not written:
            raise UsageError(f"--fetch: task {story.task} has no files that are recorded so far")
        return written

    async def step(self, wanted: StepId) -> Story:
        policy = only_policy(self.log.topics.policies, wanted.policy)
        batch = await self.gatherer.batch(policy, wanted.version) if wanted.version else None
        since = 0.0 if batch is None else batch.recorded_at
        published = await self.gatherer.publications(policy, wanted.version, since)
        if batch is None and (wanted.kind == "batch" or not published):
            raise UsageError(
                f"there is no {wanted.kind} {wanted.version} of policy {policy}. Batches begin at "
                "1, and `headrace status` shows the newest version"
            )
        samples: list[TrainedSample] = []
        if batch is not None:
            refs = [sample.trajectory for sample in batch.event.samples]
            async for trajectory in self.log.fetch_each(refs):
                samples.append(make_sample(batch.event, len(samples), trajectory))
        evaluation = None
        if wanted.kind == "version" and published:
            settings = self.recipe.evaluation
            passing = settings.passing if settings is not None else 1.0
            # A version may be published again later. Its evaluation follows the first publication.
            published_at = min(fact.recorded_at for fact in published)
            evaluation = await self.gatherer.evaluation(
                policy, wanted.version, published_at, passing
            )
        story = StepStory(
            policy,
            wanted.version,
            batch,
            samples,
            list(of_type(published, PolicyPublished)),
            await asyncio.to_thread(self._weights, published),
            evaluation,
            self.gatherer.remarks,
        )
        return Story(lambda: story_tree(story), lambda: step_page(story))

    def _weights(self, published: list[Fact[PolicyPublished]]) -> dict[str, bool]:
        """Returns whether each blob of the publications' weights is in the blob store."""
        blobs = [blob for fact in published for blob in fact.event.weight_blobs()]
        return {blob.sha256.hex(): self.blobs.holds(blob) for blob in blobs}

    async def record(self, wanted: RecordId) -> Story:
        topic = find_topic(self.log.topics, wanted.topic)
        if wanted.partition >= topic.partitions:
            raise UsageError(f"{topic.name} has only the partitions 0 to {topic.partitions - 1}")
        partition = Partition(topic.name, wanted.partition)
        at = (wanted.offset, wanted.offset + 1)
        async with aclosing(read_records(self.log.broker, {partition: at})) as records:
            found = [await readable_record(self.log, record) async for record in records]
        if found:
            return Story(lambda: found[0], lambda: record_page(found[0]))
        first, end = (await self.log.broker.ends([partition]))[partition]
        raise UsageError(
            f"{topic.name}/{wanted.partition} has no record at offset {wanted.offset}. It holds "
            f"{first} to {end - 1}, without the offsets at which transactions end"
        )

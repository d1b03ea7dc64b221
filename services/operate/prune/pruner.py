"""Finds what may be removed from a broker, a blob store and a state folder, and removes it."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import Event
from headrace.schemas.topics import POLICIES, RUNS, TOPICS, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, Patience, read_records
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import namespaces_in, topics_in
from headrace.services.operate.prune.needs import (
    ENDED_S,
    Namespace,
    Prunable,
    needed_blobs,
    needless_blobs,
)
from headrace.services.operate.run_references import needed_by
from headrace.trainer.checkpoint import Checkpoints

ARTIFACT_TOPICS = [
    topic for topic in TOPICS if topic.event and "artifacts" in topic.event.model_fields
]
"""Topics whose events may name artifacts."""


@dataclass(frozen=True)
class Pruner:
    """Finds and removes what one broker, one blob store and one state folder don't need."""

    connection: Connection
    blobs: BlobStore
    cluster: ClusterConfig
    patience: Patience
    clock: Callable[[], float] = time.time
    """Epoch seconds."""

    async def plan(self, keep: int, unnamed: bool, forget: Collection[str]) -> list[Prunable]:
        """Returns all that may be removed.

        Raises UsageError if a namespace in `forget` does not exist or still runs.
        """
        # Take the time before reading the log: a blob that is put later may have no event yet.
        now_s = self.clock()
        existing = await self.connection.broker.list_topics()
        spaces = await self._read(existing)
        _require_ended(spaces, forget, now_s)
        staying = [space for space in spaces if space.name not in forget]
        needed: set[str] = set()
        for space in staying:
            # An ended run does not need its checkpoints.
            checkpoints = {} if space.ended(now_s) else self._checkpoints(space)
            needed |= needed_blobs(space, keep, checkpoints, now_s)
        models = [model for space in staying for model in space.models()]
        needed |= await asyncio.to_thread(needed_by, models, self.blobs)
        published: set[str] = set()
        for space in spaces:
            published |= space.weights() | space.tokenizers()
        named = None
        if unnamed:
            needed |= await self._artifacts(staying, existing)
            named = published | needed
        stored = await asyncio.to_thread(lambda: list(self.blobs.stored()))
        items = list(needless_blobs(stored, published, needed, named, now_s))
        for space in spaces:
            if space.name in forget:
                items += self._whole(space, existing)
            elif space.ended(now_s):
                items += self._folder(space, "checkpoints", "its run has ended and can't continue")
        return items

    async def carry_out(self, items: Sequence[Prunable]) -> list[Prunable]:
        """Removes these items and returns those that are gone.

        A blob that was put again in the meantime stays.
        """
        gone = []
        for item in items:
            if item.blob is not None:
                blob, before = item.blob, item.put_before
                if not await asyncio.to_thread(self.blobs.remove, blob, before):
                    continue
            if item.path is not None:
                await asyncio.to_thread(shutil.rmtree, item.path, ignore_errors=True)
            if item.topics:
                await self.connection.broker.delete_topics(item.topics)
            gone.append(item)
        return gone

    async def _read(self, existing: Mapping[str, int]) -> list[Namespace]:
        """Reads `runs` and `policies` of all namespaces."""
        spaces: dict[str, Namespace] = {}
        logs: dict[Partition, EventLog] = {}
        for name in namespaces_in(existing):
            spaces[name] = Namespace(name)
            topics = Topics(name, (), 1)
            partitions = [topics.partition(topic) for topic in (RUNS, POLICIES)]
            log = self.connection.log(topics)
            logs |= {one: log for one in partitions if one.topic in existing}
        async with aclosing(self._deliveries(logs)) as deliveries:
            async for delivery in deliveries:
                space = spaces[delivery.partition.topic.partition(".")[0]]
                space.add(delivery.event, delivery.recorded_at)
        return list(spaces.values())

    async def _artifacts(
        self, namespaces: Sequence[Namespace], existing: Mapping[str, int]
    ) -> set[str]:
        """Returns the SHA-256, in hex, of the artifacts that events of these namespaces name."""
        logs: dict[Partition, EventLog] = {}
        for namespace in namespaces:
            topics = topics_in(existing, namespace.name)
            log = self.connection.log(topics)
            for topic in topics:
                if topic.topic in ARTIFACT_TOPICS and topic.name in existing:
                    logs |= dict.fromkeys(topic.all_partitions(), log)
        found: set[str] = set()
        async with aclosing(self._deliveries(logs)) as deliveries:
            async for one in deliveries:
                artifacts = getattr(one.event, "artifacts", ())
                found |= {artifact.sha256.hex() for artifact in artifacts}
        return found

    async def _deliveries(
        self, logs: Mapping[Partition, EventLog]
    ) -> AsyncGenerator[Delivery[Event]]:
        """Reads all events of these partitions, each with its log."""
        whole = dict.fromkeys(logs, WHOLE)
        records = read_records(self.connection.broker, whole, self.patience)
        async with aclosing(records):
            async for record in records:
                with suppress(DecodeError):  # Consumers report it as a dead letter.
                    yield await logs[record.partition].decode(record)

    def _checkpoints(self, namespace: Namespace) -> dict[str, list[int]]:
        folder = self.cluster.folder(namespace.name) / "checkpoints"
        policies = {one.policy for one in namespace.publications}
        return {policy: Checkpoints(folder / policy, 1).versions() for policy in policies}

    def _whole(self, namespace: Namespace, existing: Mapping[str, int]) -> Iterator[Prunable]:
        """Yields an ended namespace itself: its folder, then its topics."""
        why = "--forget names this namespace"
        yield from self._folder(namespace, "", why)
        ours = "|".join(topic.name for topic in TOPICS)
        pattern = re.compile(rf"{re.escape(namespace.name)}\.({ours})(\.[a-z0-9_-]+)?\.v1")
        topics = tuple(name for name in existing if pattern.fullmatch(name))
        yield Prunable("topics", f"{namespace.name}.*", 0, why, topics=topics)

    def _folder(self, namespace: Namespace, inside: str, why: str) -> Iterator[Prunable]:
        path = self.cluster.folder(namespace.name) / inside
        if path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Prunable("checkpoints" if inside else "folder", str(path), size, why, path=path)


def _require_ended(namespaces: Sequence[Namespace], forget: Collection[str], now_s: float) -> None:
    known = {namespace.name: namespace for namespace in namespaces}
    for name in forget:
        if name not in known:
            names = ", ".join(known) or "(none)"
            raise UsageError(f"--forget {name}: this broker has only these namespaces: {names}")
        if not known[name].ended(now_s):
            raise UsageError(
                f"--forget {name}: its run is {known[name].life.state}. Only a namespace whose run "
                f"ended at least {ENDED_S:.0f} s ago can be removed"
            )

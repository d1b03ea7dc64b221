"""Finds what may be removed from a broker, a blob store and a state folder, and removes it."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import Event
from headrace.schemas.topics import POLICIES, RUNS, TOPICS, Topic, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, Patience, read_records
from headrace.services.models.blob_owners import owner_name
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import namespaces_in
from headrace.services.operate.prune.needs import (
    ENDED_S,
    Kind,
    Namespace,
    OwnerNeeds,
    Prunable,
    needed_blobs,
    prunable_blobs,
)
from headrace.services.operate.prune.prune_record import record_prune
from headrace.services.operate.run_references import blobs_of
from headrace.trainer.checkpoint import Checkpoints

ARTIFACT_TOPICS = [
    topic for topic in TOPICS if topic.event and "artifacts" in topic.event.model_fields
]
"""Topics whose events may name artifacts."""
BATCH = 25
"""Blobs that are removed under one notice. Writers of such blobs wait meanwhile, and so does
Ctrl-C."""


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

        Raises UsageError if a namespace in `forget` does not exist or still runs, or if ACLs may
        hide topics that must be seen.
        """
        # Take the time before reading the log: a blob that is put later may have no event yet.
        now_s = self.clock()
        if unnamed and not await self.connection.broker.sees_all_topics():
            raise UsageError(
                f"--unnamed: {_HIDDEN}, and a blob that no visible event names may be theirs"
            )
        existing = await self.connection.broker.list_topics()
        spaces = await self._read(existing)
        stored = await asyncio.to_thread(lambda: list(self.blobs.stored()))
        markers = await asyncio.to_thread(lambda: list(self.blobs.owners.markers()))
        cluster = await self.connection.broker.cluster_id()
        gone = [name for name in forget if name not in {space.name for space in spaces}]
        if gone:
            owners = {marker.owner for marker in markers}
            sees_all = await self.connection.broker.sees_all_topics()
            _require_markers(gone, cluster, owners, spaces, sees_all)
        claims = {
            name if "." in name else owner_name(cluster, name): OwnerNeeds(forgotten=True)
            for name in forget
        }
        _require_ended(spaces, forget, now_s)
        staying = [space for space in spaces if space.name not in forget]
        for space in staying:
            # An ended run does not need its checkpoints.
            checkpoints = {} if space.ended(now_s) else self._checkpoints(space, cluster)
            if Topics(space.name, (), 1).name(POLICIES) in existing:  # ACLs may hide it.
                models = await asyncio.to_thread(blobs_of, space.models(), self.blobs)
                referred = {blob.sha256.hex() for blob in models}
                claims[owner_name(cluster, space.name)] = OwnerNeeds(
                    space.blobs() | space.tokenizers() | referred,
                    needed_blobs(space, keep, checkpoints, now_s) | referred,
                )
        artifacts = await self._artifacts(staying, existing) if unnamed else None
        items = list(prunable_blobs(stored, markers, claims, artifacts, now_s))
        for space in spaces:
            if space.name in forget:
                items += self._whole(space, existing, cluster)
            elif space.ended(now_s):
                folder = self.cluster.cluster_folder(space.name, cluster) / "checkpoints"
                items += _folder("checkpoints", folder, "its run has ended and can't continue")
        return [*items, *self._of_other_clusters(forget)]

    async def carry_out(self, items: Sequence[Prunable]) -> list[Prunable]:
        """Removes these items and returns those that are gone.

        A blob that was put again in the meantime stays. It is recorded before anything is removed:
        if that fails, nothing is.
        """
        await record_prune(self.connection, items)
        gone = []
        blobs = [item for item in items if item.removal is not None]
        for _, group in groupby(blobs, lambda item: item.what[:2]):
            folder = list(group)
            for first in range(0, len(folder), BATCH):
                gone += await asyncio.to_thread(self._remove, folder[first : first + BATCH])
        for item in items:
            if item.path is not None:
                await asyncio.to_thread(shutil.rmtree, item.path, ignore_errors=True)
            if item.topics:
                await self.connection.broker.delete_topics(item.topics)
            if item.removal is None:
                gone.append(item)
        return gone

    def _remove(self, items: Sequence[Prunable]) -> list[Prunable]:
        """Removes blobs whose names begin with the same digits, or files of writers that died."""
        removals = [item.removal for item in items if item.removal is not None]
        if not removals[0].name:
            return [
                item
                for item, one in zip(items, removals, strict=True)
                if one.blob is not None and self.blobs.remove(one.blob, one.put_before)
            ]
        gone = []
        for item, removal, removed in zip(
            items, removals, self.blobs.owners.remove(removals, self.blobs.remove), strict=True
        ):
            if removed is not None:
                size = removal.blob.size if removal.blob is not None and removed == "blob" else 0
                gone.append(replace(item, kind=removed, size=size))
        return gone

    async def _read(self, existing: Mapping[str, int]) -> list[Namespace]:
        """Reads `runs` and `policies` of all namespaces."""
        spaces = {name: Namespace(name) for name in namespaces_in(existing)}
        read: tuple[Topic[Any], ...] = (RUNS, POLICIES)
        for topic in read:  # The recipe in `runs` says who signs publications.
            logs: dict[Partition, EventLog] = {}
            for space in spaces.values():
                topics = Topics(space.name, (), 1, signers=space.signers())
                partition = topics.partition(topic)
                if partition.topic in existing:
                    logs[partition] = self.connection.log(topics)
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
            names = {topic.real_name(namespace.name) for topic in ARTIFACT_TOPICS} & existing.keys()
            # The namespace may lack topics, which say how many partitions it has.
            most = max((existing[name] for name in names), default=1)
            log = self.connection.log(Topics(namespace.name, (), most))
            for name in names:
                every = (Partition(name, number) for number in range(existing[name]))
                logs |= dict.fromkeys(every, log)
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

    def _checkpoints(self, namespace: Namespace, cluster: str) -> dict[str, list[int]]:
        folder = self.cluster.cluster_folder(namespace.name, cluster) / "checkpoints"
        policies = {one.policy for one in namespace.publications}
        return {policy: Checkpoints(folder / policy, 1).versions() for policy in policies}

    def _whole(
        self, namespace: Namespace, existing: Mapping[str, int], cluster: str
    ) -> Iterator[Prunable]:
        """Yields an ended namespace itself: its folder, then its topics.

        If another cluster has a namespace of that name, what it has in the folder stays.
        """
        why = "--forget names this namespace"
        folder = self.cluster.folder(namespace.name)
        ours = self.cluster.cluster_folder(namespace.name, cluster)
        shared = any(one != ours for one in folder.glob("cluster-*"))
        yield from _folder("folder", ours if shared else folder, why)
        kinds = "|".join(topic.name for topic in TOPICS)
        pattern = re.compile(rf"{re.escape(namespace.name)}\.({kinds})(\.[a-z0-9_-]+)?\.v1")
        topics = tuple(name for name in existing if pattern.fullmatch(name))
        yield Prunable("topics", f"{namespace.name}.*", 0, why, topics=topics)

    def _of_other_clusters(self, forget: Collection[str]) -> Iterator[Prunable]:
        """Yields what this machine has of namespaces of clusters that are gone."""
        for name in forget:
            cluster, dot, namespace = name.rpartition(".")
            if dot:
                path = self.cluster.cluster_folder(namespace, unquote(cluster))
                yield from _folder("folder", path, "--forget names this namespace")


def _folder(kind: Kind, path: Path, why: str) -> Iterator[Prunable]:
    if path.is_dir():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield Prunable(kind, str(path), size, why, path=path)


_HIDDEN = (
    "ACLs may hide topics of this broker from you. Use a principal that may describe the cluster "
    "and all topics. Without it, prune can't see which blobs other namespaces need"
)


def _require_markers(
    names: Collection[str],
    cluster: str,
    owners: Collection[str],
    spaces: Sequence[Namespace],
    sees_all: bool,
) -> None:
    """Raises UsageError if a namespace that the broker does not show can't be forgotten."""
    for name in names:
        if "." in name:
            if name.startswith(owner_name(cluster, "")):
                raise UsageError(f"--forget {name}: it is of this cluster. Give its namespace only")
            if name not in owners:
                known = ", ".join(sorted(owner for owner in owners if "." in owner)) or "(none)"
                raise UsageError(
                    f"--forget {name}: the blob store has only markers of these owners: {known}"
                )
        elif owner_name(cluster, name) not in owners:
            known = ", ".join(space.name for space in spaces) or "(none)"
            raise UsageError(f"--forget {name}: this broker has only these namespaces: {known}")
        elif not sees_all:
            raise UsageError(f"--forget {name}: {_HIDDEN}")


def _require_ended(namespaces: Sequence[Namespace], forget: Collection[str], now_s: float) -> None:
    known = {namespace.name: namespace for namespace in namespaces}
    for name in forget:
        if name in known and not known[name].ended(now_s):
            raise UsageError(
                f"--forget {name}: its run is {known[name].life.state}. Only a namespace whose run "
                f"ended at least {ENDED_S:.0f} s ago can be removed. "
                f"`headrace end --namespace {name}` ends it for good"
            )

"""Namespaces with published weights, for tests of prune."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from headrace.schemas.codec import Codec
from headrace.schemas.events import Adapter, Blob, PolicyPublished, RunStateEntered
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Broker
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience
from headrace.services.models.blob_owners import owner_name
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.operate.prune.pruner import Pruner
from tests.memory.memory_registry import MemoryRegistry

LATER_S = 30 * 86_400.0
"""How far ahead the pruner's clock is: all that was put is old."""


class SharedCluster:
    """Namespaces with published weights, on one broker and one store."""

    def __init__(self, folder: Path, broker: Broker, cluster_id: str = "memory") -> None:
        self.broker = broker
        self.cluster_id = cluster_id
        self.registry = MemoryRegistry()
        self.blobs = LocalBlobStore(folder / "blobs")
        """As programs use it that write no markers."""
        self.cluster = ClusterConfig(state=folder)

    def store(self, name: str) -> LocalBlobStore:
        """The store as a namespace's trainer uses it."""
        return LocalBlobStore(self.cluster.state / "blobs", owner_name(self.cluster_id, name))

    def owners(self, blob: Blob) -> set[str]:
        return {one.owner for one in self.blobs.owners.markers() if one.name == blob.sha256.hex()}

    def log(self, name: str) -> EventLog:
        topics = Topics(name, ("default",), 1)
        codec = Codec()
        self.registry.prepare(codec, topics)
        return EventLog(self.broker, topics, codec, self.registry, "test")

    async def make(
        self, name: str, *weights: bytes, ended: bool = True, base: bytes = b""
    ) -> list[Blob]:
        """A namespace that published these weights, one version after the other, of a base."""
        adapter, store = None, self.store(name)
        if base:
            adapter = Adapter(
                base=store.put(base), base_digest=bytes(32), rank=1, alpha=1.0, targets=()
            )
        log = self.log(name)
        await self.broker.create_topics({one.name: (one.partitions, {}) for one in log.topics})
        states: list[Literal["started", "ended"]] = ["started", "ended"] if ended else ["started"]
        for state in states:
            await log.send(
                RunStateEntered(namespace=name, state=state, recipe="{}", digest=bytes(32))
            )
        tokenizer, blobs = store.put(b"tokenizer"), []
        for version, content in enumerate(weights):
            blobs.append(store.put(content))
            await log.send(
                PolicyPublished(
                    policy="default", version=version, status="trained", digest=bytes(32),
                    full=blobs[-1], full_version=version, tokenizer=tokenizer, adapter=adapter,
                )
            )  # fmt: skip
        return blobs

    def pruner(self, ahead_s: float = LATER_S, broker: Broker | None = None) -> Pruner:
        """A pruner that uses this broker object, or another one."""
        connection = Connection(broker or self.broker, self.registry, "test")  # type: ignore[arg-type]
        clock = time.time() + ahead_s
        return Pruner(
            connection, self.blobs, self.cluster, Patience(lambda line: None), lambda: clock
        )

    def held(self, blobs: list[Blob]) -> list[bool]:
        return [self.blobs.holds(blob) for blob in blobs]

"""Pruning a broker whose namespaces share one blob store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import pytest

from headrace.errors import BlobError, UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import Adapter, Blob, PolicyPublished, RunStateEntered
from headrace.schemas.topics import Topics
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.operate.prune.needs import ENDED_S, PUT_S
from headrace.services.operate.prune.pruner import Pruner
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.operate.show.world import in_a_world

LATER_S = 30 * 86_400.0
"""How far ahead the pruner's clock is: all that was put is old."""


class Cluster:
    """Namespaces with published weights, on one broker and one store."""

    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.registry = MemoryRegistry()
        self.blobs = LocalBlobStore(folder / "blobs")
        self.cluster = ClusterConfig(state=folder)

    def log(self, name: str) -> EventLog:
        topics = Topics(name, ("default",), 1)
        codec = Codec()
        self.registry.prepare(codec, topics)
        return EventLog(self.broker, topics, codec, self.registry, "test")

    async def make(
        self, name: str, *weights: bytes, ended: bool = True, base: bytes = b""
    ) -> list[Blob]:
        """A namespace that published these weights, one version after the other, of a base."""
        adapter = None
        if base:
            adapter = Adapter(
                base=self.blobs.put(base), base_digest=bytes(32), rank=1, alpha=1.0, targets=()
            )
        log = self.log(name)
        await self.broker.create_topics({one.name: (one.partitions, {}) for one in log.topics})
        states: list[Literal["started", "ended"]] = ["started", "ended"] if ended else ["started"]
        for state in states:
            await log.send(
                RunStateEntered(namespace=name, state=state, recipe="{}", digest=bytes(32))
            )
        tokenizer, blobs = self.blobs.put(b"tokenizer"), []
        for version, content in enumerate(weights):
            blobs.append(self.blobs.put(content))
            await log.send(
                PolicyPublished(
                    policy="default", version=version, status="trained", digest=bytes(32),
                    full=blobs[-1], full_version=version, tokenizer=tokenizer, adapter=adapter,
                )
            )  # fmt: skip
        return blobs

    def pruner(self, ahead_s: float = LATER_S) -> Pruner:
        connection = Connection(self.broker, self.registry, "test")  # type: ignore[arg-type]
        clock = time.time() + ahead_s
        return Pruner(
            connection, self.blobs, self.cluster, Patience(lambda line: None), lambda: clock
        )

    def held(self, blobs: list[Blob]) -> list[bool]:
        return [self.blobs.holds(blob) for blob in blobs]


def test_the_base_of_an_adapter_stays_as_long_as_a_version_needs_it(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        adapters = await cluster.make("run", b"a", b"b", b"c", base=b"base")
        base = cluster.blobs.put(b"base")
        plan = await cluster.pruner().plan(keep=1, unnamed=True, forget=())
        assert {item.what for item in plan} == {blob.sha256.hex() for blob in adapters[:2]}
        assert cluster.blobs.holds(base)

    in_a_world(test)


def test_what_another_namespace_needs_stays(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        one = await cluster.make("one", b"a", b"b", b"c")
        other = await cluster.make("other", b"z", b"a")
        stray = cluster.blobs.put(b"of another broker")
        pruner = cluster.pruner()
        plan = await pruner.plan(keep=1, unnamed=False, forget=())
        assert {item.what for item in plan} == {one[1].sha256.hex(), other[0].sha256.hex()}
        assert cluster.held(one) == [True] * 3, "a plan changes nothing"

        assert await pruner.carry_out(plan) == plan
        assert cluster.held(one) == [True, False, True]
        assert cluster.held(other) == [False, True]
        assert cluster.blobs.holds(stray)
        assert await pruner.plan(keep=1, unnamed=False, forget=()) == []
        (unnamed,) = await pruner.plan(keep=1, unnamed=True, forget=())
        assert unnamed.what == stray.sha256.hex()

    in_a_world(test)


def test_what_was_just_put_and_what_is_put_again_stays(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        blobs = await cluster.make("one", b"a", b"b")
        assert await cluster.pruner(ahead_s=ENDED_S).plan(1, False, ()) == []
        pruner = cluster.pruner(PUT_S + 1)
        plan = await pruner.plan(1, False, ())
        assert [item.what for item in plan] == [blobs[0].sha256.hex()]
        path = cluster.blobs.get(blobs[0])
        again = time.time() + PUT_S
        os.utime(path, (again, again))  # as `put` does
        assert await pruner.carry_out(plan) == []
        assert cluster.blobs.get(blobs[0]) == path

    in_a_world(test)


def test_an_ended_namespace_is_forgotten_whole(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        one = await cluster.make("one", b"a", b"b")
        await cluster.make("one-more", b"b")
        await cluster.broker.create_topics({"one.theirs": (1, {})})
        checkpoint = tmp_path / "one" / "checkpoints" / "default" / "v000000000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state").write_bytes(b"12345")
        pruner = cluster.pruner()

        sizes = {item.kind: item.size for item in await pruner.plan(1, False, ())}
        assert sizes == {"checkpoints": 5, "blob": 1}, "it never goes on"
        plan = await pruner.plan(1, False, ("one",))
        assert {item.kind for item in plan} == {"blob", "folder", "topics"}
        await pruner.carry_out(plan)
        assert cluster.held(one) == [False, True]
        assert not (tmp_path / "one").exists()
        left = await cluster.broker.list_topics()
        assert "one.theirs" in left
        assert {name.split(".")[0] for name in left} == {"one", "one-more"}
        assert [name for name in left if name.startswith("one.")] == ["one.theirs"]

    in_a_world(test)


def test_what_runs_or_is_not_there_is_not_forgotten(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        blobs = await cluster.make("runs", b"a", b"b", ended=False)
        (tmp_path / "runs" / "checkpoints").mkdir(parents=True)
        pruner = cluster.pruner()
        with pytest.raises(UsageError, match="runs: its run is started"):
            await pruner.plan(1, False, ("runs",))
        with pytest.raises(UsageError, match="these namespaces: runs"):
            await pruner.plan(1, False, ("nope",))
        assert [item.what for item in await pruner.plan(1, False, ())] == [blobs[0].sha256.hex()]
        with pytest.raises(UsageError, match="is started"):
            await cluster.pruner(0).plan(1, True, ("runs",))

    in_a_world(test)


def test_a_blob_that_is_put_while_it_is_removed_is_not_lost(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    blob = store.put(b"content")
    (stored,) = store.stored()
    assert stored.name == blob.sha256.hex()
    assert not store.remove(stored, stored.put_at)
    assert store.remove(stored, stored.put_at + 1)
    assert not store.remove(stored, stored.put_at + 1)
    with pytest.raises(BlobError, match="pruned"):
        store.get(blob)
    store.put(b"content")
    os.utime(store.get(blob), (1, 1))
    assert store.put(b"content") == blob
    (stored,) = store.stored()
    assert stored.put_at > 1, "a blob that is put again counts as put now"
    (tmp_path / "ab").mkdir(exist_ok=True)
    (tmp_path / "ab" / "notes.txt").touch()
    (tmp_path / "README").touch()
    (tmp_path / "put-left").touch()
    assert sorted(one.name for one in store.stored()) == ["", blob.sha256.hex()]

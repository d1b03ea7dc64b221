"""Pruning a broker whose namespaces share one blob store."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from headrace.errors import BlobError, UsageError
from headrace.schemas.events import Blob, EpisodeEnded, TaskSubmitted
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.operate.prune.needs import ENDED_S, PUT_S
from headrace.services.operate.prune.prune_record import recorded_in
from tests.memory.memory_broker import MemoryBroker
from tests.unit.operate.prune.shared_cluster import SharedCluster
from tests.unit.operate.show.world import in_a_world


class HidingBroker(MemoryBroker):
    """A broker whose ACLs hide all topics that begin with `hidden`."""

    hidden = ""

    async def list_topics(self) -> dict[str, int]:
        found = await super().list_topics()
        return {
            name: count
            for name, count in found.items()
            if not self.hidden or not name.startswith(self.hidden)
        }

    async def sees_all_topics(self) -> bool:
        return not self.hidden


class Cluster(SharedCluster):
    """A cluster in memory that can hide topics."""

    def __init__(self, folder: Path) -> None:
        self.hiding = HidingBroker()
        super().__init__(folder, self.hiding)


def test_the_base_of_an_adapter_stays_as_long_as_a_version_needs_it(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        adapters = await cluster.make("run", b"a", b"b", b"c", base=b"base")
        base = Blob(sha256=hashlib.sha256(b"base").digest(), size=4)
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
        gone = {one[1].sha256.hex(): "blob", other[0].sha256.hex(): "blob"}
        assert {item.what: item.kind for item in plan} == gone
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


def test_files_that_tasks_and_episodes_name_stay(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        await cluster.make("one", b"a", ended=False)
        store, log = cluster.store("one"), cluster.log("one")
        gone_in, out, lost = store.put(b"in"), store.put(b"out"), store.put(b"no event names it")
        named = gone_in.model_copy(update={"name": "in/a"})
        await log.send(
            TaskSubmitted(
                source="s", task_id="t", item_id="i", agent="a", roles={}, max_turns=1,
                max_tokens=1, deadline_s=1, artifacts=(named,),
            )
        )  # fmt: skip
        kept = out.model_copy(update={"name": "out/a"})
        await cluster.broker.create_topics({"half.runs.v1": (1, {})})
        await log.send(EpisodeEnded(task=0, sample=0, item_id="i", ending="finished",
                                    artifacts=(kept,)))  # fmt: skip
        pruner = cluster.pruner()
        assert [one.what for one in await pruner.plan(1, False, ())] == []
        plan = await pruner.plan(1, True, ())
        assert [one.what for one in plan] == [lost.sha256.hex()]
        await pruner.carry_out(plan)
        assert cluster.held([gone_in, out, lost]) == [True, True, False]

    in_a_world(test)


def test_an_ended_namespace_is_forgotten_whole(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        one = await cluster.make("one", b"a", b"b")
        await cluster.make("one-more", b"b")
        await cluster.broker.create_topics({"one.theirs": (1, {})})
        folder = cluster.cluster.cluster_folder("one", "memory")
        checkpoint = folder / "checkpoints" / "default" / "v000000000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state").write_bytes(b"12345")
        pruner = cluster.pruner()

        sizes = {item.kind: item.size for item in await pruner.plan(1, False, ())}
        assert sizes == {"checkpoints": 5, "blob": 1}, "it never goes on"
        plan = await pruner.plan(1, False, ("one",))
        assert {item.kind for item in plan} == {"blob", "marker", "folder", "topics"}
        await pruner.carry_out(plan)
        assert cluster.held(one) == [False, True]
        assert not (tmp_path / "one").exists()
        left = await cluster.broker.list_topics()
        assert "one.theirs" in left
        assert {name.split(".")[0] for name in left} == {"one", "one-more"}
        assert [name for name in left if name.startswith("one.")] == ["one.theirs"]

    in_a_world(test)


def test_checkpoints_of_another_cluster_stay_until_it_is_named(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        await cluster.make("one", b"a")
        theirs = LocalBlobStore(tmp_path / "blobs", "old%2Fcluster.one").put(b"theirs")
        folders = [
            cluster.cluster.cluster_folder("one", name) for name in ("memory", "old/cluster")
        ]
        for folder in folders:
            (folder / "checkpoints").mkdir(parents=True)
        pruner = cluster.pruner()
        plan = await pruner.plan(1, False, ())
        assert [item.path for item in plan] == [folders[0] / "checkpoints"]
        topics = await cluster.broker.list_topics()
        assert recorded_in(plan, "memory", topics, newest="") == ["one"]
        await pruner.carry_out(await pruner.plan(1, False, ("one",)))
        assert [folder.exists() for folder in folders] == [False, True]
        await pruner.carry_out(await pruner.plan(1, False, ("old%2Fcluster.one",)))
        assert not folders[1].exists()
        assert not cluster.blobs.holds(theirs)

    in_a_world(test)


def test_what_runs_or_is_not_there_is_not_forgotten(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        blobs = await cluster.make("runs", b"a", b"b", ended=False)
        (tmp_path / "runs" / "cluster-memory" / "checkpoints").mkdir(parents=True)
        pruner = cluster.pruner()
        with pytest.raises(UsageError, match="runs: its run is started"):
            await pruner.plan(1, False, ("runs",))
        with pytest.raises(UsageError, match="these namespaces: runs"):
            await pruner.plan(1, False, ("nope",))
        assert [item.what for item in await pruner.plan(1, False, ())] == [blobs[0].sha256.hex()]
        with pytest.raises(UsageError, match="is started"):
            await cluster.pruner(0).plan(1, True, ("runs",))
        with pytest.raises(UsageError, match="it is of this cluster"):
            await pruner.plan(1, False, ("memory.runs",))
        with pytest.raises(UsageError, match=r"only markers of these owners: memory\.runs"):
            await pruner.plan(1, False, ("other.runs",))

    in_a_world(test)


def test_a_namespace_that_acls_hide_keeps_its_blobs(tmp_path: Path) -> None:
    """A prunes a hundred times, while B, whom it does not see, has some of the same weights."""

    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        ours = await cluster.make("a", b"1", b"2", b"3", ended=False)
        theirs = await cluster.make("b", b"2", b"x", b"1", base=b"base")
        cluster.hiding.hidden = "b."
        pruner = cluster.pruner()
        for count in range(100):
            plan = await pruner.plan(1, False, ())
            kinds = [(item.kind, item.what) for item in await pruner.carry_out(plan)]
            expected = {("marker", blob.sha256.hex()) for blob in ours[:2]} if not count else set()
            assert set(kinds) == expected
        assert cluster.held([*ours, *theirs]) == [True] * 6
        assert cluster.owners(ours[0]) == cluster.owners(theirs[0]) == {"memory.b"}
        for unnamed, forget in ((True, ()), (False, ("b",))):
            with pytest.raises(UsageError, match="ACLs may hide topics"):
                await pruner.plan(1, unnamed, forget)

        cluster.hiding.hidden = ""
        await pruner.carry_out(await pruner.plan(1, False, ()))
        assert cluster.held(theirs) == [False, False, True]

    in_a_world(test)


def test_a_namespace_of_which_acls_hide_a_part_keeps_its_blobs(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        await cluster.make("a", b"1", b"2")
        cluster.hiding.hidden = "a.policies"
        assert await cluster.pruner().plan(1, False, ()) == []

    in_a_world(test)


def test_two_teams_that_prune_one_after_the_other_leave_nothing(tmp_path: Path) -> None:
    """Each still sees the other's marker when it makes its plan."""

    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        blobs = await cluster.make("a", b"shared", b"a")
        await cluster.make("b", b"shared", b"b")
        pruner, plans = cluster.pruner(), []
        for hidden in ("a.", "b."):
            cluster.hiding.hidden = hidden
            plans.append(await pruner.plan(1, False, ()))
        gone = [item.kind for plan in plans for item in await pruner.carry_out(plan)]
        assert gone == ["marker", "blob"]
        assert cluster.held(blobs) == [False, True]
        assert cluster.owners(blobs[0]) == set()

    in_a_world(test)


def test_what_an_older_release_put_goes_only_with_unnamed(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        cluster.blobs.put(b"base of an older run")
        blobs = await cluster.make("a", b"base of an older run", b"new", b"newest")
        pruner = cluster.pruner()
        await pruner.carry_out(await pruner.plan(1, False, ()))
        assert cluster.held(blobs) == [True, False, True]
        assert cluster.owners(blobs[0]) == {"unknown"}
        await pruner.carry_out(await pruner.plan(1, True, ()))
        assert cluster.held(blobs) == [False, False, True]

    in_a_world(test)


def test_the_blobs_of_a_cluster_that_is_gone_can_be_forgotten(tmp_path: Path) -> None:
    async def test(_: object) -> None:
        cluster = Cluster(tmp_path)
        old = LocalBlobStore(tmp_path / "blobs", "old-cluster.run").put(b"weights")
        pruner = cluster.pruner()
        assert await pruner.plan(1, True, ()) == []
        await pruner.carry_out(await pruner.plan(1, False, ("old-cluster.run",)))
        assert not cluster.blobs.holds(old)
        assert cluster.owners(old) == set()

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

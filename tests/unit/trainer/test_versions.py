"""Versions in the store: whole or by deltas, each to be had whatever the store has lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from headrace.schemas.events import Blob, PolicyPublished
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.remote_blobs import RemoteBlobStore
from headrace.services.models.weights import weights_digest
from headrace.trainer.versions import StoredVersion, VersionStore

ELEMENTS = 4000
ACTS = ["next", "same", "lose", "restart", "read"]


def weights(version: int, changed: int = 40) -> bytes:
    """A version's weights: so many elements differ from the version before."""
    values = np.zeros(ELEMENTS, dtype=np.uint16)
    for number in range(1, version + 1):
        values[np.random.default_rng(number).choice(ELEMENTS, changed, replace=False)] = number
    return save({"a": values})


def said(version: int, stored: StoredVersion) -> PolicyPublished:
    return PolicyPublished(
        policy="p",
        version=version,
        status="trained",
        digest=stored.digest,
        full=stored.full,
        full_version=stored.full_version,
        deltas=stored.deltas,
        tensor_digests=stored.tensors,
    )


def file_of(store: LocalBlobStore, blob: Blob) -> Path:
    return store.get(blob)


def readable(blobs: LocalBlobStore, folder: Path, version: int, stored: StoredVersion) -> bytes:
    """The weights that a reader who has nothing yet makes of a publication."""
    return LocalWeights(blobs, folder / "reader").fetch(said(version, stored)).read_bytes()


def test_a_chain_is_begun_again_after_so_many_versions(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs, full_every=3)
    for version in range(8):
        stored = store.add(version, weights(version))
        begun = version // 3 * 3
        links = [(delta.from_version, delta.to_version) for delta in stored.deltas]
        assert stored.full_version == begun
        assert links == [(n, n + 1) for n in range(begun, version)]
        assert stored.digest == weights_digest(weights(version))
        assert weights_digest(weights(version)) == weights_digest(
            readable(blobs, tmp_path, version, stored)
        )
        assert sum(delta.blob.size for delta in stored.deltas) < stored.full.size / 10


def test_each_is_whole_where_that_is_asked_for(tmp_path: Path) -> None:
    store = VersionStore(LocalBlobStore(tmp_path), full_every=1)
    for version in range(3):
        stored = store.add(version, weights(version))
        assert (stored.full_version, stored.deltas) == (version, ())


def test_a_chain_never_costs_as_much_as_whole_weights(tmp_path: Path) -> None:
    store = VersionStore(LocalBlobStore(tmp_path), full_every=1000)
    chains = set()
    for version in range(12):
        stored = store.add(version, weights(version, changed=ELEMENTS // 4))
        assert sum(delta.blob.size for delta in stored.deltas) < stored.full.size
        chains.add(len(stored.deltas))
    assert chains == {0, 1, 2, 3}


def test_each_version_has_the_digests_of_its_tensors(tmp_path: Path) -> None:
    """Also as a delta, and those of an older release are left as they are."""
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs, full_every=3)
    for version in range(3):
        stored = store.add(version, weights(version))
        assert stored.tensors is not None
        table = json.loads(blobs.get(stored.tensors).read_text())
        assert table == {"a": weights_digest(weights(version)).hex()}
    older = said(2, stored).model_copy(update={"tensor_digests": None})
    resumed = VersionStore(blobs, full_every=3).resume(older, weights(2))
    assert resumed == StoredVersion.of(older)


def test_unchanged_weights_are_those_of_before(tmp_path: Path) -> None:
    store = VersionStore(LocalBlobStore(tmp_path), full_every=2)
    store.add(0, weights(0))
    one = store.add(1, weights(1))
    assert [store.add(version, weights(1)) for version in range(2, 5)] == [one] * 3
    assert store.add(5, weights(2)).full_version == 5


@pytest.mark.parametrize("lost", ["full", "delta"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_lost_blob_is_followed_by_whole_weights(tmp_path: Path, lost: str, how: str) -> None:
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs, full_every=9)
    store.add(0, weights(0))
    before = store.add(1, weights(1))
    path = file_of(blobs, before.full if lost == "full" else before.deltas[0].blob)
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-1])
    after = store.add(2, weights(2))
    assert (after.full_version, after.deltas) == (2, ())
    assert store.add(3, weights(3)).full_version == 2


@pytest.mark.parametrize("lost", ["nothing", "full", "delta"])
def test_a_repair_gives_what_every_reader_can_have(tmp_path: Path, lost: str) -> None:
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs, full_every=9)
    store.add(0, weights(0))
    before = store.add(1, weights(1))
    if lost != "nothing":
        file_of(blobs, before.full if lost == "full" else before.deltas[0].blob).unlink()
    after, other = store.repair()
    assert other == (lost != "nothing")
    assert readable(blobs, tmp_path, 1, after) == weights(1)
    assert store.repair() == (after, False)


@pytest.mark.parametrize("how", ["repair", "resume", "unchanged"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_lost_table_of_digests_comes_back_and_nothing_else_is_stored(
    tmp_path: Path, how: str, damage: str
) -> None:
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs, full_every=9)
    store.add(0, weights(0))
    before = store.add(1, weights(1))
    assert before.tensors is not None
    table = file_of(blobs, before.tensors)
    whole = table.read_bytes()
    files = set(tmp_path.rglob("*"))
    table.unlink() if damage == "gone" else table.write_bytes(whole[:-1])
    match how:
        case "repair":
            assert store.repair() == (before, False)
        case "resume":
            resumed = VersionStore(blobs, full_every=9).resume(said(1, before), weights(1))
            assert resumed == before
        case "unchanged":
            assert store.add(2, weights(1)) == before
    assert table.read_bytes() == whole
    assert set(tmp_path.rglob("*")) == files


def test_a_table_of_other_bytes_is_replaced_once_it_is_lost(tmp_path: Path) -> None:
    """Such as one that another release has written. Then the version is published again."""
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs)
    ours = store.add(0, weights(0))
    theirs = replace(ours, tensors=Blob(sha256=bytes(32), size=3))
    assert VersionStore(blobs).resume(said(0, theirs), weights(0)) == ours


def test_an_adapters_base_is_uploaded_once(tmp_path: Path) -> None:
    class Counting(RemoteBlobStore):
        def put(self, data: bytes | Path, media: str = "") -> Blob:
            puts.append(media)
            return super().put(data, media)

    puts: list[str] = []
    for _ in range(3):
        blobs = Counting(f"local://{tmp_path}/blobs", tmp_path / "cache", "cluster.ours")
        base = VersionStore(blobs).keep_base(lambda: b"base" * 1000)
        assert blobs.get(base).read_bytes() == b"base" * 1000
        assert [one.name for one in blobs.owners.markers()] == [base.sha256.hex()]
    assert len(puts) == 1


def test_what_an_older_release_has_stored_is_marked_when_training_continues(
    tmp_path: Path,
) -> None:
    store = VersionStore(LocalBlobStore(tmp_path), full_every=9)
    store.add(0, weights(0))
    stored = store.add(1, weights(1))
    ours = LocalBlobStore(tmp_path, "cluster.ours")
    assert VersionStore(ours).resume(said(1, stored), weights(1)) == stored
    marked = {one.name for one in ours.owners.markers() if one.owner == "cluster.ours"}
    assert marked == {blob.sha256.hex() for blob in stored.blobs}


def test_whole_weights_that_were_lost_come_back_under_their_name(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    store = VersionStore(blobs)
    before = store.add(0, weights(0))
    file_of(blobs, before.full).unlink()
    assert store.repair() == (before, False)
    assert file_of(blobs, before.full).read_bytes() == weights(0)


@pytest.mark.parametrize("lost", [False, True])
def test_a_restarted_trainer_goes_on_with_the_chain(tmp_path: Path, lost: bool) -> None:
    blobs = LocalBlobStore(tmp_path)
    first = VersionStore(blobs, full_every=9)
    first.add(0, weights(0))
    before = first.add(1, weights(1))
    if lost:
        file_of(blobs, before.deltas[0].blob).unlink()
    second = VersionStore(blobs, full_every=9)
    resumed = second.resume(said(1, before), weights(1))
    assert (resumed != before) == lost
    after = second.add(2, weights(2))
    assert after.full_version == (1 if lost else 0)
    assert readable(blobs, tmp_path, 2, after) == weights(2)


def test_weights_that_came_out_otherwise_are_stored_whole(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    first = VersionStore(blobs, full_every=9)
    before = first.add(0, weights(0))
    resumed = VersionStore(blobs, full_every=9).resume(said(0, before), weights(1))
    assert resumed.digest != before.digest
    assert readable(blobs, tmp_path, 0, resumed) == weights(1)
    nothing = said(0, before).model_copy(update={"full": None})
    assert VersionStore(blobs).resume(nothing, weights(0)) == before


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["next", "same", "lose", "restart", "read"]), max_size=12), st.data()
)
def test_whatever_happens_the_newest_version_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str], data: st.DataObject
) -> None:
    """One reader follows at its own pace, another begins again each time."""
    folder = tmp_path_factory.mktemp("versions")
    blobs = LocalBlobStore(folder / "blobs")
    store = VersionStore(blobs, full_every=4)
    follower = LocalWeights(blobs, folder / "follower")
    version = content = 0
    stored = store.add(0, weights(0))
    for act in acts:
        match act:
            case "next":
                version, content = version + 1, content + 1
                stored = store.add(version, weights(content))
            case "same":
                version += 1
                stored = store.add(version, weights(content))
            case "lose":
                assert stored.tensors is not None
                lost = data.draw(st.sampled_from([*stored.blobs, stored.tensors]))
                path = file_of(blobs, lost)
                path.unlink()
                stored, _ = store.repair()
            case "restart":
                store = VersionStore(blobs, full_every=4)
                assert store.resume(said(version, stored), weights(content)) == stored
            case "read":
                got = follower.fetch(said(version, stored)).read_bytes()
                assert got == weights(content)
    assert stored.tensors is not None
    assert blobs.holds(stored.tensors)
    assert readable(blobs, folder, version, stored) == weights(content)
    assert follower.fetch(said(version, stored)).read_bytes() == weights(content)


def test_versions_that_are_files_are_stored_as_those_in_memory(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path / "blobs")
    in_memory = VersionStore(LocalBlobStore(tmp_path / "others"), full_every=3)
    store = VersionStore(blobs, full_every=3)
    for version in range(5):
        file = tmp_path / f"{version}.safetensors"
        file.write_bytes(weights(version))
        stored = store.add(version, file)
        assert stored == in_memory.add(version, weights(version))
        assert readable(blobs, tmp_path, version, stored) == weights(version)
        assert list(tmp_path.glob("[0-9].safetensors")) == [file]
    blobs.get(stored.full).unlink()
    again, changed = store.repair()
    assert changed
    assert blobs.get(again.full).read_bytes() == weights(4)

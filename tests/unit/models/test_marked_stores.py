"""Stores write and remove markers, whatever keeps them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.events import Blob
from headrace.services.models.blob_owners import UNKNOWN, BlobOwners, Removal, owner_name
from headrace.services.models.blobs import BlobStore
from headrace.services.models.remote_blobs import open_blob_store

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")

OPEN = Callable[[str | None], BlobStore]
"""Opens the test's store for an owner."""
A, B = owner_name("MkU3OEVB-w_g", "a"), owner_name("some.other/cluster", "b")


@pytest.fixture(params=["folder", "memory", "local"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OPEN:
    url = {
        "folder": str(tmp_path / "blobs"),
        "memory": f"memory://{uuid.uuid4().hex}/blobs",
        "local": f"local://{tmp_path}/remote",
    }[request.param]
    return lambda owner: open_blob_store(url, tmp_path / "cache", owner)


def marks(store: BlobStore) -> set[tuple[str, str]]:
    return {(one.name, one.owner) for one in store.owners.markers()}


def removal(store: BlobStore, blob: Blob, *owners: str) -> Removal:
    name = blob.sha256.hex()
    (found,) = (one for one in store.stored() if one.name == name)
    mine = {one for one in store.owners.markers() if one.name == name and one.owner in owners}
    return Removal(name, frozenset(mine), found, time.time() + 3600)


def remove(store: BlobStore, one: Removal) -> Any:
    (removed,) = store.owners.remove([one], store.remove)
    return removed


def test_each_owner_of_a_blob_has_a_marker(opened: OPEN) -> None:
    ours, theirs, reader = opened(A), opened(B), opened(None)
    assert list(ours.owners.markers()) == []
    blob = ours.put(b"base")
    name = blob.sha256.hex()
    assert marks(reader) == {(name, A)}
    assert theirs.put(b"base") == ours.put(b"base") == blob
    assert marks(reader) == {(name, A), (name, B)}
    assert all(abs(one.put_at - time.time()) < 3600 for one in reader.owners.markers())
    assert [(one.name, one.size) for one in reader.stored()] == [(name, 4)]


def test_a_blob_is_removed_with_its_last_marker(opened: OPEN) -> None:
    ours, theirs = opened(A), opened(B)
    blob = ours.put(b"base")
    theirs.put(b"base")
    plan = removal(ours, blob, A)
    assert remove(ours, plan) == "marker"
    assert ours.holds(blob)
    assert remove(ours, plan) is None
    assert remove(theirs, removal(theirs, blob, B)) == "blob"
    assert not ours.holds(blob)
    assert marks(ours) == set()


def test_what_was_put_again_since_stays(opened: OPEN) -> None:
    store = opened(A)
    blob = store.put(b"base")
    plan = removal(store, blob, A)
    time.sleep(0.02)
    store.put(b"base")
    assert remove(store, plan) is None
    assert store.holds(blob)
    assert len(marks(store)) == 1


def test_a_blob_without_a_marker_gets_one_of_an_unknown_owner(opened: OPEN) -> None:
    blob = opened(None).put(b"from an older release")
    name = blob.sha256.hex()
    store = opened(A)
    assert marks(store) == set()
    store.put(b"from an older release")
    assert marks(store) == {(name, A), (name, UNKNOWN)}
    assert remove(store, removal(store, blob, A)) == "marker"
    assert store.holds(blob)
    opened(B).claim(blob)
    assert marks(store) == {(name, B), (name, UNKNOWN)}


def test_the_marker_is_there_before_the_blob(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    add = BlobOwners.add

    def noted(owners: BlobOwners, name: str, holds: Callable[[], bool]) -> None:
        add(owners, name, holds)
        held.append(holds())

    monkeypatch.setattr(BlobOwners, "add", noted)
    store = opened(A)
    store.put(b"new")
    assert held == [False]


def test_a_blob_that_stays_although_its_marker_is_stale_keeps_the_marker(opened: OPEN) -> None:
    """A program without markers has put it a moment ago."""
    store = opened(A)
    blob = store.put(b"base")
    plan = removal(store, blob, A)
    assert remove(store, Removal(plan.name, plan.markers, plan.blob, put_before=0.0)) is None
    assert len(marks(store)) == 1


def test_the_notice_of_a_prune_is_gone_when_it_ends(opened: OPEN) -> None:
    store = opened(A)
    blob = store.put(b"base")
    plan = removal(store, blob, A)

    def fails(*_: object) -> bool:
        raise OSError("the store is down")

    with pytest.raises(OSError, match="down"):
        store.owners.remove([plan], fails)
    begun = time.monotonic()
    opened(B).put(b"base")
    assert time.monotonic() - begun < 5

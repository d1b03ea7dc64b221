"""Files of tasks and episodes: stored within limits, fetched, and written to a folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headrace.errors import BlobError, DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import Blob
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.schemas.untrusted.artifact_names import BadName
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.tasks import artifact_store
from headrace.services.tasks.artifact_store import (
    ArtifactStore,
    store_task_files,
    write_artifacts,
)

LIMITS = Artifacts(files=2, file_mb=1, task_mb=1, episode_mb=1)
MIB = 1 << 20


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobStore:
    return LocalBlobStore(tmp_path / "blobs", "cluster.run")


def test_files_come_back_by_name_and_are_marked(blobs: LocalBlobStore, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"1,2")
    stored = store_task_files(blobs, LIMITS, {"in/a.csv": tmp_path / "in.csv", "b": b"b"})
    assert [(one.name, one.size, one.media) for one in stored] == [
        ("in/a.csv", 3, "text/csv"),
        ("b", 1, ""),
    ]
    other = LocalBlobStore(tmp_path / "blobs", "cluster.other")
    files = ArtifactStore(other, LIMITS).files_of(stored)
    assert asyncio.run(files["in/a.csv"].read()) == b"1,2"
    # Whoever reads a file needs it: a prune of the submitter's namespace must not remove it.
    owners = {marker.owner for marker in blobs.owners.markers() if marker.name == _hex(stored[0])}
    assert owners == {"cluster.run", "cluster.other"}


def test_a_file_of_the_store_needs_no_upload(blobs: LocalBlobStore) -> None:
    known = blobs.put(b"result")
    (stored,) = store_task_files(blobs, LIMITS, {"in": known})
    assert (stored.sha256, stored.name) == (known.sha256, "in")
    with pytest.raises(UsageError, match="blob store has no file"):
        store_task_files(blobs, LIMITS, {"in": Blob(sha256=bytes(32), size=1)})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../x": b""}, "relative path"),
        ({"a": b"", "b": b"", "c": b""}, "artifacts.files"),
        ({"a": bytes(MIB + 1)}, "artifacts.file_mb"),
        ({"a": bytes(MIB), "b": b"x"}, "artifacts.task_mb"),
        ({"a": Path("/nowhere/at/all")}, "can't read"),
    ],
)
def test_wrong_files_of_a_task_are_refused(
    blobs: LocalBlobStore, files: dict[str, bytes | Path], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        store_task_files(blobs, LIMITS, files)


def test_what_exceeds_a_limit_is_left_out_and_named(blobs: LocalBlobStore, tmp_path: Path) -> None:
    store = ArtifactStore(blobs, LIMITS)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    stored = asyncio.run(
        store.put({"big": bytes(MIB + 1), "s": tmp_path / "sparse", "a": b"1"}, {})
    )
    assert [one.name for one in stored.artifacts] == ["a"]
    assert [one.partition(":")[0] for one in stored.left_out] == ["big", "s"]
    again = asyncio.run(store.put({"a": b"2", "b": b"b", "c": b"c"}, {"a": 1}))
    assert [one.name for one in again.artifacts] == ["a", "b"]
    assert "artifacts.files" in again.left_out[0]
    full = asyncio.run(store.put({"b": b"12"}, {"a": MIB - 1}))
    assert "artifacts.episode_mb" in full.left_out[0]
    with pytest.raises(BadName):
        asyncio.run(store.put({"/a": b""}, {}))


def test_a_pipe_keeps_nobody_waiting(blobs: LocalBlobStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadName, match="not a plain file"):
        asyncio.run(ArtifactStore(blobs, LIMITS).put({"a": tmp_path / "pipe"}, {}))


def test_a_file_that_the_store_shows_late_is_waited_for(
    blobs: LocalBlobStore, tmp_path: Path
) -> None:
    stored = blobs.put(b"late")
    place = blobs.get(stored)
    place.rename(tmp_path / "elsewhere")

    async def main() -> None:
        fetching = asyncio.create_task(ArtifactStore(blobs, LIMITS).fetch(stored))
        await asyncio.sleep(0.3)
        assert not fetching.done()
        (tmp_path / "elsewhere").rename(place)
        assert (await fetching).read_bytes() == b"late"

    asyncio.run(main())


def test_a_store_that_refuses_a_file_is_asked_again(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file, not a folder")
    store = ArtifactStore(LocalBlobStore(tmp_path / "blobs", "cluster.run"), LIMITS)

    async def main() -> None:
        putting = asyncio.create_task(store.put({"a": b"1"}, {}))
        await asyncio.sleep(0.3)
        assert not putting.done()
        (tmp_path / "blobs").unlink()
        assert [one.size for one in (await putting).artifacts] == [1]

    asyncio.run(main())


def test_files_that_are_refused_hold_up_no_others(
    blobs: LocalBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalBlobStore.put

    def put(store: LocalBlobStore, data: bytes, media_type: str = "") -> Blob:
        if data == b"bad":
            raise DependencyError("the store refuses it")
        return real(store, data, media_type)

    monkeypatch.setattr(LocalBlobStore, "put", put)
    monkeypatch.setattr(artifact_store, "LATE_S", 30.0)

    async def main() -> None:
        store = ArtifactStore(blobs, LIMITS)
        refused = [
            asyncio.create_task(store.put({"a": b"bad"}, {}))
            for _ in range(2 * artifact_store.AT_ONCE)
        ]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            assert [one.size for one in (await store.put({"b": b"1"}, {})).artifacts] == [1]
        for task in refused:
            assert not task.done()
            task.cancel()

    asyncio.run(main())


def test_a_failing_store_is_a_failure_of_the_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_store, "LATE_S", 0.2)
    (tmp_path / "blobs").write_text("a file, not a folder")
    store = ArtifactStore(LocalBlobStore(tmp_path / "blobs", "cluster.run"), LIMITS)
    for work in (store.put({"a": b""}, {}), store.fetch(Blob(sha256=bytes(32), size=1, name="a"))):
        with pytest.raises(InfrastructureError, match="artifacts_unavailable") as raised:
            asyncio.run(work)
        assert raised.value.retryable


def test_names_of_the_log_can_t_lead_out_of_a_folder(blobs: LocalBlobStore, tmp_path: Path) -> None:
    blob = blobs.put(b"text")
    folder = tmp_path / "to"

    def named(name: str) -> Blob:
        return blob.model_copy(update={"name": name})

    assert write_artifacts(blobs, [named("a/b"), named("c")], folder) == {
        "a/b": folder / "a" / "b",
        "c": folder / "c",
    }
    assert (folder / "a" / "b").read_bytes() == b"text"
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "b", "c"]
    (tmp_path / "outside").mkdir()
    (folder / "link").symlink_to(tmp_path / "outside")
    for name in ("../x", "/tmp/x", "link/x"):
        with pytest.raises(UsageError):
            write_artifacts(blobs, [named(name)], folder)
    assert list((tmp_path / "outside").iterdir()) == []
    with pytest.raises(BlobError):
        write_artifacts(blobs, [Blob(sha256=bytes(32), size=1, name="gone")], folder)


def _hex(blob: Blob) -> str:
    return blob.sha256.hex()

"""Weights by deltas at a reader: gaps and damage are made good by the whole ones, or refused."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from headrace.errors import BlobError, DependencyError
from headrace.schemas.events import Adapter, Blob, PolicyPublished, WeightsDelta
from headrace.services.base.blob_cache import UNUSED_S
from headrace.services.inference.local_weights import LocalWeights, scratch_folder
from headrace.services.models.blobs import BlobStore, LocalBlobStore
from headrace.services.models.deltas import diff
from headrace.services.models.remote_blobs import RemoteBlobStore
from headrace.services.models.weights import weights_digest
from headrace.trainer.versions import VersionStore

ELEMENTS = 2000


def weights(version: int) -> bytes:
    values = np.zeros(ELEMENTS, dtype=np.uint16)
    values[: 10 * version] = np.arange(10 * version)
    return save({"a": values})


class Reads(LocalBlobStore):
    """A store that notes what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[Blob] = []

    def get(self, blob: Blob) -> Path:
        self.read.append(blob)
        return super().get(blob)


class Scene:
    """A chain of versions 0 to 4 in a store, and a reader."""

    def __init__(self, folder: Path) -> None:
        self.blobs = Reads(folder / "blobs")
        self.local = LocalWeights(self.blobs, folder / "scratch" / "p")
        self.full = self.blobs.put(weights(0))
        self.deltas: list[WeightsDelta] = []
        for version in range(1, 5):
            made = diff(weights(version - 1), weights(version), 1 << 20)
            assert made is not None
            blob = self.blobs.put(made)
            self.deltas.append(
                WeightsDelta(blob=blob, from_version=version - 1, to_version=version)
            )

    def published(self, version: int, since: int = 0) -> PolicyPublished:
        full = self.full if since == 0 else self.blobs.put(weights(since))
        return PolicyPublished(
            policy="p", version=version, status="trained", digest=weights_digest(weights(version)),
            full=full, full_version=since, deltas=tuple(self.deltas[since:version]),
        )  # fmt: skip

    def fetch(self, version: int, since: int = 0) -> list[int]:
        """Reads a version; returns which blobs that took: 0 the whole weights, n the nth delta."""
        self.blobs.read.clear()
        published = self.published(version, since)
        assert self.local.fetch(published).read_bytes() == weights(version)
        chain = [published.full, *(delta.blob for delta in self.deltas)]
        return [chain.index(blob) for blob in self.blobs.read]

    def damage(self, number: int, data: bytes | None) -> None:
        name = self.deltas[number - 1].blob.sha256.hex()
        path = self.blobs._root / name[:2] / name[2:]
        path.unlink() if data is None else path.write_bytes(data)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.fetch(0) == [0]
    assert scene.fetch(1) == [0, 1]
    assert scene.fetch(2) == [2]
    assert scene.fetch(2) == []
    assert scene.fetch(4) == [3, 4]
    assert scene.fetch(4, since=4) == []
    assert len(list((tmp_path / "scratch").iterdir())) == 1


def test_who_comes_late_begins_with_the_whole_weights(tmp_path: Path) -> None:
    assert Scene(tmp_path).fetch(3) == [0, 1, 2, 3]


def test_a_gap_is_made_good_by_the_whole_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.fetch(1)
    assert scene.fetch(4, since=2) == [0, 3, 4]


@pytest.mark.parametrize("data", [None, b"", b"x" * 300])
def test_what_the_store_cant_give_is_refused_and_later_made_good(
    tmp_path: Path, data: bytes | None
) -> None:
    scene = Scene(tmp_path)
    scene.fetch(2)
    scene.damage(3, data)
    with pytest.raises(BlobError, match=r"is not in|damaged"):
        scene.local.fetch(scene.published(3))
    assert scene.fetch(2) == [0, 1, 2]
    assert scene.fetch(3, since=3) == [0]
    assert scene.fetch(4, since=3) == [0, 4]


def test_a_delta_of_other_weights_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is at a version 2 that another trainer made: applied to it, the delta is wrong."""
    scene = Scene(tmp_path)
    scene.fetch(2)
    other = bytearray(scene.local._path.read_bytes())
    other[-1] ^= 1
    scene.local._path.write_bytes(other)
    assert scene.fetch(3) == [3, 0, 1, 2, 3]
    assert "is built again" in caplog.text


def test_a_sound_chain_to_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    wrong = scene.published(2).model_copy(update={"digest": bytes(32)})
    with pytest.raises(BlobError, match="was published as 0000"):
        scene.local.fetch(wrong)
    assert scene.fetch(2) == [0, 1, 2]


class Damage:
    """A version of two tensors by a delta, and another one of them whole."""

    def __init__(self, folder: Path) -> None:
        self.blobs = LocalBlobStore(folder / "blobs")
        self.local = LocalWeights(self.blobs, folder / "scratch" / "p")
        store = VersionStore(self.blobs, full_every=2)
        self.published = []
        for version in range(3):
            stored = store.add(version, self.weights(version))
            self.published.append(
                PolicyPublished(
                    policy="p", version=version, status="trained", digest=stored.digest,
                    full=stored.full, full_version=stored.full_version, deltas=stored.deltas,
                    tensor_digests=stored.tensors,
                )
            )  # fmt: skip
        assert [len(one.deltas) for one in self.published] == [0, 1, 0]

    @staticmethod
    def weights(version: int) -> bytes:
        one = np.zeros(ELEMENTS, dtype=np.uint16)
        one[:version] = 7
        return save({"layers.0.a": one, "layers.1.b": one})

    def error(self, published: PolicyPublished) -> str:
        with pytest.raises(BlobError) as raised:
            self.local.fetch(published)
        return str(raised.value)


def test_a_damaged_tensor_of_a_file_is_named(tmp_path: Path) -> None:
    scene = Damage(tmp_path)
    whole = scene.published[2].full
    assert whole is not None
    path = scene.blobs.get(whole)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = scene.error(scene.published[2])
    assert "is damaged" in error
    assert error.endswith("1 of its 2 tensors differ: layers.1.b")
    path.write_bytes(data[:-1])
    error = scene.error(scene.published[2])
    assert "Which of its tensors differ can't be told: " in error
    assert "its tensors end at byte" in error


def test_a_tensor_that_deltas_made_wrong_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Damage(tmp_path)
    after = scene.published[1]
    scene.local.fetch(after)
    made = diff(scene.weights(1), scene.weights(2), 1 << 20)
    assert made is not None
    link = WeightsDelta(blob=scene.blobs.put(made), from_version=1, to_version=2)
    newest = scene.published[2].model_copy(
        update={"full": after.full, "full_version": 0, "deltas": (*after.deltas, link)}
    )
    data = bytearray(scene.local._path.read_bytes())
    data[-1] ^= 1
    scene.local._path.write_bytes(data)
    assert scene.local.fetch(newest).read_bytes() == scene.weights(2)
    assert "1 of its 2 tensors differ: layers.1.b" in caplog.text


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("own", "All of its tensors are as they were published, so the published digest is wrong"),
        ("none", "was published as 0000"),
        ("gone", "Which of its tensors differ can't be told: blob"),
        ("text", "Which of its tensors differ can't be told: can't read the digests"),
        ("list", "has no digests of tensors"),
    ],
)
def test_a_wrong_digest_is_told_from_wrong_tensors(tmp_path: Path, table: str, words: str) -> None:
    scene = Damage(tmp_path)
    changes: dict[str, object] = {"digest": bytes(32)}
    if table != "own":
        given = {"text": b"{", "list": b"[1]"}.get(table)
        changes["tensor_digests"] = None if given is None else scene.blobs.put(given)
    if table == "gone":
        changes["tensor_digests"] = Blob(sha256=bytes(32), size=3)
    error = scene.error(scene.published[2].model_copy(update=changes))
    assert words in error
    assert ("tensors" in error) == (table != "none")


def adapter_of(base: bytes, version: int, blobs: BlobStore) -> PolicyPublished:
    """A version of an adapter, whole."""
    blob, made = blobs.put(base), weights(version)
    return PolicyPublished(
        policy="p", version=version, status="trained", digest=weights_digest(made),
        full=blobs.put(made), full_version=version,
        adapter=Adapter(
            base=blob, base_digest=weights_digest(base), rank=1, alpha=1.0, targets=("a",)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("apart_s", [UNUSED_S / 12, 2 * UNUSED_S])
def test_a_base_stays_on_the_machine_while_its_adapters_are_served(
    tmp_path: Path, apart_s: float
) -> None:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    cache = tmp_path / "cache"
    blobs = RemoteBlobStore(f"local://{tmp_path}/remote", cache)
    local = LocalWeights(blobs, tmp_path / "scratch" / "p")
    base = save({"a": np.ones(ELEMENTS, dtype=np.uint16)})
    served = [local.weights(adapter_of(base, 0, blobs))]
    assert served[0].adapter is not None
    fetched_as = served[0].adapter.base.stat().st_ino
    for version in range(1, 15):
        for path in cache.iterdir():  # time passes
            status = path.stat()
            os.utime(path, (status.st_atime - apart_s, status.st_mtime - apart_s))
        now = local.weights(adapter_of(base, version, blobs))
        assert now.adapter is not None
        assert now.adapter.base.stat().st_ino == fetched_as


def test_a_base_in_a_folder_keeps_the_time_when_it_was_put(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path / "blobs")
    local = LocalWeights(blobs, tmp_path / "scratch" / "p")
    published = [adapter_of(weights(9), version, blobs) for version in range(2)]
    long_ago = time.time() - 10_000
    adapter = local.weights(published[0]).adapter
    assert adapter is not None
    os.utime(adapter.base, (long_ago, long_ago))
    local.weights(published[1])
    assert adapter.base.stat().st_mtime == pytest.approx(long_ago, abs=1)


def test_a_disk_that_takes_nothing_is_a_dependency(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "scratch").write_text("no folder")
    with pytest.raises(DependencyError, match="can't write weights"):
        scene.local.fetch(scene.published(1))
    with (
        pytest.raises(DependencyError, match="can't make a folder"),
        scratch_folder(tmp_path / "scratch"),
    ):
        pass


def test_a_scratch_folder_goes_with_its_process(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as second:
        with scratch_folder(tmp_path) as first:
            assert first != second
            assert first.is_dir()
            assert second.is_dir()
        assert [path for path in tmp_path.iterdir()] == [second]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with scratch_folder(tmp_path) as folder:
            (folder / "weights").write_bytes(b"x")
            os.write(writing, str(folder).encode())
            signal.pause()
    left = Path(os.read(reading, 1000).decode())
    with scratch_folder(tmp_path) as beside:
        assert left.is_dir()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with scratch_folder(tmp_path):
            assert not left.exists()
            assert beside.is_dir()

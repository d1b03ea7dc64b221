"""Blobs by fsspec: the same as in a folder, whatever the store does."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BlobError, DependencyError
from headrace.schemas.events import Blob
from headrace.services.base.blob_cache import UNUSED_S
from headrace.services.models import remote_blobs
from headrace.services.models.remote_blobs import RemoteBlobStore, open_blob_store

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """`memory://`, and fsspec's own way to a folder: one is flat, the other is not."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/blobs"
    return f"local://{tmp_path}/remote"


@pytest.fixture
def store(url: str, tmp_path: Path) -> RemoteBlobStore:
    opened = open_blob_store(url, tmp_path / "cache", None)
    assert isinstance(opened, RemoteBlobStore)
    return opened


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_blobs, "RETRY_S", 0.001)


def write(store: RemoteBlobStore, blob: Blob, data: bytes) -> None:
    """Damages a blob in the store."""
    store._files.pipe_file(store._key(blob), data)


@pytest.mark.parametrize("data", [b"", b"weights" * 300_000])
def test_what_is_put_is_got(store: RemoteBlobStore, data: bytes) -> None:
    for _ in range(2):
        blob = store.put(data, "text/plain")
        assert blob == Blob(
            sha256=hashlib.sha256(data).digest(), size=len(data), media="text/plain"
        )
    assert store.holds(blob)
    assert store.get(blob).read_bytes() == data
    assert [(one.name, one.size) for one in store.stored()] == [(blob.sha256.hex(), len(data))]


def test_two_machines_share_a_store(url: str, tmp_path: Path) -> None:
    blob = RemoteBlobStore(url, tmp_path / "a").put(b"weights")
    other = RemoteBlobStore(url, tmp_path / "b")
    assert other.get(blob).parent == tmp_path / "b"
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700
    other.verify(blob)


def test_what_was_got_is_not_fetched_again_unless_it_is_damaged(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = store.put(b"weights")
    path = store.get(blob)
    fetched: list[str] = []
    cat_file = store._files.cat_file

    def noted(key: str, start: int, end: int) -> Any:
        fetched.append(key)
        return cat_file(key, start, end)

    monkeypatch.setattr(store._files, "cat_file", noted)
    assert store.get(blob) == path
    assert not fetched
    path.write_bytes(b"weightz")
    assert store.get(blob).read_bytes() == b"weights"
    assert len(fetched) == 1


def test_one_worker_of_a_machine_fetches_a_blob_for_all(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [RemoteBlobStore(url, tmp_path / "cache") for _ in range(4)]
    blob = stores[0].put(b"weights" * 1000)
    fetched: list[str] = []
    cat_file = stores[0]._files.cat_file

    def slow(key: str, start: int, end: int) -> Any:
        fetched.append(key)
        time.sleep(0.3)
        return cat_file(key, start, end)

    for store in stores:
        monkeypatch.setattr(store._files, "cat_file", slow)
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda store: store.get(blob), stores))
    assert len(paths) == len(fetched) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [blob.sha256.hex()]


def test_a_fetch_that_fails_is_made_by_the_next_worker(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [RemoteBlobStore(url, tmp_path / "cache") for _ in range(2)]
    blob = stores[0].put(b"weights")
    entered = threading.Event()

    def stuck(_: Blob) -> None:
        entered.set()
        time.sleep(0.2)
        raise DependencyError("the store is gone")

    monkeypatch.setattr(stores[0], "_fetch", stuck)
    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(stores[0].get, blob)
        entered.wait(5)
        other = threads.submit(stores[1].get, blob)
        with pytest.raises(DependencyError):
            failing.result()
        assert other.result().read_bytes() == b"weights"


def test_a_process_that_is_stopped_in_a_fetch_delays_the_others_for_a_bounded_time(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_blobs, "CALL_S", 0.2)
    store = RemoteBlobStore(url, tmp_path / "cache")
    blob = store.put(b"weights")
    (tmp_path / "cache").mkdir()
    with store._cache.only_one(blob, wait_s=0):
        assert RemoteBlobStore(url, tmp_path / "cache").get(blob).read_bytes() == b"weights"


def test_unused_blobs_leave_the_machine(store: RemoteBlobStore) -> None:
    old, used, new = (store.put(data) for data in (b"old", b"used", b"new"))
    long_ago = time.time() - UNUSED_S - 1
    for blob in (old, used):
        os.utime(store.get(blob), (long_ago, long_ago))
    store.get(used)
    path = store.get(new)
    assert {one.read_bytes() for one in path.parent.iterdir()} == {b"used", b"new"}
    assert store.get(old).read_bytes() == b"old"


def test_a_disk_that_fills_up_is_named_and_the_blob_is_not_fetched_again(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = store.put(b"weights")
    reads: list[str] = []
    cat_file = store._files.cat_file

    def noted(key: str, start: int, end: int) -> Any:
        reads.append(key)
        return cat_file(key, start, end)

    monkeypatch.setattr(store._files, "cat_file", noted)
    monkeypatch.setattr(store._cache, "_new_part", partial(Path("/dev/full").open, "wb"))
    with pytest.raises(
        DependencyError, match=r"disk of this machine, in .*: .*No space left.* Free some space"
    ):
        store.get(blob)
    assert len(reads) == 1


def test_nothing_is_fetched_if_the_disk_has_too_little_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteBlobStore(f"local://{tmp_path}/remote", tmp_path / "cache")
    size = shutil.disk_usage(tmp_path).free + (1 << 36)
    blob = Blob(sha256=bytes(32), size=size)
    stored = Path(store._key(blob))
    stored.parent.mkdir(parents=True)
    stored.touch()
    os.truncate(stored, size)  # a file with a hole takes no space
    monkeypatch.setattr(store._files, "cat_file", None)
    with pytest.raises(DependencyError, match=r"disk of this machine.* is full, only \d+ bytes"):
        store.get(blob)


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b""])
def test_damage_is_seen_and_mended_by_the_next_put(store: RemoteBlobStore, damage: bytes) -> None:
    blob = store.put(b"weights")
    write(store, blob, damage)
    assert store.holds(blob) == (len(damage) == 7)
    with pytest.raises(BlobError, match="damaged"):
        store.get(blob)
    store.put(b"weights")
    assert store.get(blob).read_bytes() == b"weights"


def test_an_absent_blob_is_said_to_be_absent(store: RemoteBlobStore) -> None:
    blob = Blob(sha256=bytes(32), size=1)
    assert not store.holds(blob)
    for look in (store.get, store.verify):
        with pytest.raises(BlobError, match="is not in"):
            look(blob)


def test_only_what_was_not_put_since_is_removed(store: RemoteBlobStore) -> None:
    blob = store.put(b"weights")
    (one,) = store.stored()
    assert abs(one.put_at - time.time()) < 3600
    assert not store.remove(one, put_before=one.put_at)
    assert store.remove(one, put_before=one.put_at + 1)
    assert not store.remove(one, put_before=one.put_at + 1)
    assert not store.holds(blob)


class Flaky:
    """A file system whose calls fail so many times, then pass."""

    def __init__(self, inner: Any, failures: int) -> None:
        self._inner = inner
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("reset by peer")
            return getattr(self._inner, name)(*arguments, **options)

        return call


@pytest.mark.usefixtures("soon")
def test_what_fails_is_tried_again_a_few_times(store: RemoteBlobStore) -> None:
    flaky = store._files = Flaky(store._files, remote_blobs.ATTEMPTS - 1)
    blob = store.put(b"weights")
    flaky.failures = remote_blobs.ATTEMPTS
    with pytest.raises(DependencyError, match=r"can't read|can't look for blob"):
        store.get(blob)
    assert store.get(blob).read_bytes() == b"weights"
    flaky.failures = 1000
    with pytest.raises(DependencyError, match=r"can't write blob .* 4 times: reset by peer"):
        store.put(b"more")


@pytest.mark.usefixtures("soon")
def test_a_store_that_does_not_answer_is_a_dependency(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = store.put(b"weights")
    answered = threading.Event()
    monkeypatch.setattr(remote_blobs, "CALL_S", 0.05)
    monkeypatch.setattr(store._files, "info", lambda key: answered.wait(60))
    with pytest.raises(DependencyError, match=r"no answer within"):
        store.holds(blob)
    answered.set()


@pytest.mark.usefixtures("soon")
def test_a_transfer_that_hangs_costs_the_limit_of_one_range(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of the whole blob, it would cost more than 80 s."""
    monkeypatch.setattr(remote_blobs, "CALL_S", 1.0)
    monkeypatch.setattr(remote_blobs, "SLOWEST_BYTES_PER_S", 1000)
    monkeypatch.setattr(remote_blobs, "RANGE_BYTES", 1000)
    data = os.urandom(80_050)
    blob = store.put(data)
    fetched: list[int] = []
    answered, cat_file = threading.Event(), store._files.cat_file

    def hangs_once(key: str, start: int, end: int) -> Any:
        fetched.append(start)
        if start == 3000 and fetched.count(start) == 1:
            answered.wait(60)
        return cat_file(key, start, end)

    monkeypatch.setattr(store._files, "cat_file", hangs_once)
    began = time.monotonic()
    assert store.get(blob).read_bytes() == data
    assert time.monotonic() - began < 20
    assert sorted(fetched) == sorted([*range(0, 80_050, 1000), 3000])
    answered.set()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("wrong", [b"", b"weight", b"weights" * 2])
def test_a_range_with_another_length_is_read_again(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    blob = store.put(b"weights")
    answers, cat_file = [wrong], store._files.cat_file

    def short_once(key: str, start: int, end: int) -> Any:
        return answers.pop() if answers else cat_file(key, start, end)

    monkeypatch.setattr(store._files, "cat_file", short_once)
    assert store.get(blob).read_bytes() == b"weights"
    monkeypatch.setattr(store._files, "cat_file", lambda key, start, end: wrong)
    blob = store.put(b"weightz")
    with pytest.raises(DependencyError, match=f"{len(wrong)} of 7 bytes arrived"):
        store.get(blob)


@pytest.mark.usefixtures("soon")
def test_an_upload_that_arrives_in_part_is_not_stored(
    store: RemoteBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_file = store._files.pipe_file
    monkeypatch.setattr(store._files, "pipe_file", lambda key, data: pipe_file(key, data[:3]))
    with pytest.raises(DependencyError, match="3 of 7 bytes arrived"):
        store.put(b"weights")
    assert not store.holds(Blob(sha256=hashlib.sha256(b"weights").digest(), size=7))


def test_a_cache_that_takes_nothing_is_a_dependency(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = RemoteBlobStore(url, tmp_path / "file")
    blob = store.put(b"weights")
    with pytest.raises(DependencyError, match="can't keep the 7 bytes of blob"):
        store.get(blob)

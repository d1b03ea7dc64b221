"""Blobs: named by their content, whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.errors import BlobError, DependencyError, UsageError
from headrace.schemas.events import Blob
from headrace.services.base.files import file_digest as digest
from headrace.services.models import blobs
from headrace.services.models.blobs import LocalBlobStore, disk_errors
from headrace.services.models.remote_blobs import open_blob_store


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("data", [b"", b"weights" * 400_000])
def test_what_is_put_is_got(tmp_path: Path, data: bytes) -> None:
    store = LocalBlobStore(tmp_path / "blobs")

    blob = store.put(data, "text/plain")

    assert blob == Blob(sha256=hashlib.sha256(data).digest(), size=len(data), media="text/plain")
    assert store.get(blob).read_bytes() == data


def test_the_same_bytes_are_the_same_blob(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path / "blobs")

    assert store.put(b"abc" * 1_000_000) == store.put(b"abc" * 1_000_000)
    assert len(files(tmp_path / "blobs")) == 1


def test_many_writers_of_one_blob_leave_one_whole_file(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    with ThreadPoolExecutor(8) as pool:
        put = list(pool.map(lambda _: LocalBlobStore(tmp_path).put(data), range(40)))

    assert len(set(blob.sha256 for blob in put)) == 1
    assert [path.read_bytes() for path in files(tmp_path)] == [data]


def test_an_absent_blob_is_said_to_be_absent(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match="is not in"):
        LocalBlobStore(tmp_path).get(Blob(sha256=bytes(32), size=1))


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b"weights and more"])
def test_damage_is_seen_and_mended_by_the_next_put(tmp_path: Path, damage: bytes) -> None:
    store = LocalBlobStore(tmp_path)
    blob = store.put(b"weights")
    store.get(blob).write_bytes(damage)

    with pytest.raises(BlobError, match="damaged"):
        store.get(blob)
    assert store.put(b"weights") == blob
    assert store.get(blob).read_bytes() == b"weights"


def test_a_verified_blob_is_read_again_only_if_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> bytes:
        read.append(path)
        return digest(path)

    monkeypatch.setattr(blobs, "file_digest", counted)
    store = LocalBlobStore(tmp_path)
    blob = store.put(b"weights")
    path = store.get(blob)
    read.clear()
    store.verify(blob)
    store.verify(blob)
    assert len(read) == 2, "the file is so new that another write may have the same time"
    for seconds in (1000, 2000):
        os.utime(path, (seconds, seconds))
        read.clear()
        store.verify(blob)
        store.verify(blob)
        assert len(read) == 1
    path.write_bytes(b"weightz")
    with pytest.raises(BlobError, match="damaged"):
        store.verify(blob)
    path.unlink()
    with pytest.raises(BlobError, match="is not in"):
        store.verify(blob)


def test_a_blob_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    blob = store.put(b"weights")
    with pytest.raises(BlobError, match="7 bytes"):
        store.get(blob.model_copy(update={"size": 8}))


def test_a_full_disk_is_a_dependency_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails half way."""
    store = LocalBlobStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DependencyError, match="can't write a blob"):
            store.put(bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert files(tmp_path) == []


def test_a_folder_without_permission_is_a_usage_error() -> None:
    with (
        pytest.raises(UsageError, match=r"can't write x.svg: .*denied.* may not write there"),
        disk_errors("write x.svg"),
    ):
        raise PermissionError(errno.EACCES, "denied", "x.svg")


def test_a_store_that_is_no_folder_is_a_dependency(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DependencyError, match="can't write a blob"):
        LocalBlobStore(tmp_path / "file").put(b"x")


def test_a_store_is_opened_by_path_or_file_url(tmp_path: Path) -> None:
    blob = open_blob_store(str(tmp_path / "with space"), tmp_path, None).put(b"x")
    url = (tmp_path / "with space").as_uri()
    assert "%20" in url
    assert stat.S_ISREG(open_blob_store(url, tmp_path, None).get(blob).stat().st_mode)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "give a folder"),
        ("file://host/x", "give a folder"),
        ("nonsense://x/y", "Protocol not known"),
        ("s3://bucket/key", r"pip install .*fsspec\[s3\]"),
    ],
)
def test_what_nothing_here_serves_is_refused(tmp_path: Path, url: str, reason: str) -> None:
    if url.startswith("s3") and find_spec("s3fs") is not None:
        pytest.skip("s3fs is installed")
    with pytest.raises(UsageError, match=reason):
        open_blob_store(url, tmp_path, None)


def test_a_file_whose_put_is_killed_is_not_there_and_can_be_put_again(tmp_path: Path) -> None:
    store, file = LocalBlobStore(tmp_path / "blobs"), tmp_path / "file"
    file.write_bytes(b"data" * 700_000)
    program = (
        "import os, pathlib, signal, sys\n"
        "from headrace.services.models.blobs import LocalBlobStore\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalBlobStore(pathlib.Path(sys.argv[1])).put(pathlib.Path(sys.argv[2]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "blobs"), str(file)])
    assert killed.returncode == -signal.SIGKILL
    assert [one.name for one in store.stored()] == [""]  # an unfinished file, which is pruned
    blob = store.put(file, "media")
    assert blob == store.put(file.read_bytes(), "media")
    assert store.get(blob).read_bytes() == file.read_bytes()

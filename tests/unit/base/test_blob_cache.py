"""A machine's folder of blobs: what is unused or left behind makes room, what is in use stays."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from headrace.schemas.events import Blob
from headrace.services.base.blob_cache import LOCK, UNUSED_S, BlobCache


def blob_of(data: bytes) -> Blob:
    return Blob(sha256=hashlib.sha256(data).digest(), size=len(data))


def writes(data: bytes) -> Callable[[IO[bytes]], None]:
    def fetch(file: IO[bytes]) -> None:
        file.write(data)

    return fetch


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    cache = BlobCache(tmp_path / "cache")
    cache.remove_unused()
    return cache


def parts(cache: BlobCache) -> list[Path]:
    return list(cache.folder.glob("get-*"))


def add(cache: BlobCache, data: bytes) -> Path:
    path = cache.add(blob_of(data), writes(data))
    assert path is not None
    assert path.read_bytes() == data
    return path


def test_other_bytes_than_the_blobs_are_not_kept(cache: BlobCache) -> None:
    assert cache.add(blob_of(b"weights"), writes(b"weightz")) is None
    assert list(cache.folder.iterdir()) == []


def test_the_files_of_killed_processes_are_removed(cache: BlobCache) -> None:
    def dies(file: IO[bytes]) -> None:
        file.write(b"w" * 1000)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        if not (child := os.fork()):
            cache.add(blob_of(b"weights"), dies)
            os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert len(parts(cache)) == 3
    assert cache.remove_unused() == 3000
    assert parts(cache) == []


def test_the_file_of_a_process_that_lives_stays(cache: BlobCache) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(file: IO[bytes]) -> None:
        entered.set()
        go_on.wait(10)
        file.write(b"weights")

    with ThreadPoolExecutor(1) as threads:
        adding = threads.submit(cache.add, blob_of(b"weights"), slow)
        entered.wait(10)
        assert cache.remove_unused() == 0
        assert len(parts(cache)) == 1
        go_on.set()
        path = adding.result()
    assert path is not None
    assert path.read_bytes() == b"weights"
    assert parts(cache) == []


def test_the_lock_of_a_fetch_that_takes_hours_stays_until_its_process_dies(
    cache: BlobCache,
) -> None:
    lock = cache.folder / f"{blob_of(b'weights').sha256.hex()}{LOCK}"
    stray = cache.folder / "a folder"
    stray.mkdir()
    with cache.only_one(blob_of(b"weights"), 1.0):
        for path in (lock, stray):
            os.utime(path, (0, 0))
        cache.remove_unused()
        assert lock.exists()
    lock.touch()
    os.utime(lock, (0, 0))
    cache.remove_unused()
    assert [path.name for path in cache.folder.iterdir()] == ["a folder"]


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    cache: BlobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[Path] = []

    def late(file: IO[bytes], how: int) -> None:
        if not removed:
            removed.extend(parts(cache))
            removed[0].unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    add(cache, b"weights")
    assert len(removed) == 1


def test_a_full_disk_is_an_error_and_nothing_is_fetched_again(
    cache: BlobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(cache, b"used")
    fetched: list[bytes] = []

    def fetch(file: IO[bytes]) -> None:
        fetched.append(b"weights")
        file.write(b"weights")

    monkeypatch.setattr(cache, "_new_part", full_disk)
    with pytest.raises(OSError, match="No space left") as raised:
        cache.add(blob_of(b"weights"), fetch)
    assert raised.value.errno == errno.ENOSPC
    assert len(fetched) == 1
    assert cache.find(blob_of(b"used")) is not None


def test_on_a_full_disk_unused_blobs_make_room(
    cache: BlobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a blob that was in use until the fetch began."""
    unused, new_part = add(cache, b"unused"), cache._new_part
    used = add(cache, b"used")
    long_ago = time.time() - UNUSED_S - 1
    os.utime(unused, (long_ago, long_ago))

    @contextmanager
    def full_until_there_is_room() -> Iterator[IO[bytes]]:
        with full_disk() if unused.exists() else new_part() as file:
            yield file

    monkeypatch.setattr(cache, "_new_part", full_until_there_is_room)
    add(cache, b"weights")
    assert used.exists()
    assert not unused.exists()


@contextmanager
def full_disk() -> Iterator[IO[bytes]]:
    with Path("/dev/full").open("wb") as file:
        yield file

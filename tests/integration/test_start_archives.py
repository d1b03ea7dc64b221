"""Start-up archives: damaged ones do no harm, and one recorder at a time leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.infra.local import archives, down, jars, up
from headrace.infra.local import detached as processes
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local.start import KINDS

RECORDER = [sys.executable, "-m", "headrace.infra.local.archives"]
BOUND_S = 540.0
"""The bounds of a start and of writing the archives, on a machine that does much else."""


@pytest.fixture
def cache(local_stack: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without archives, and with the jars of the usual one, which the stack has fetched."""
    cache = tmp_path / "cache" / "headrace"
    cache.mkdir(parents=True)
    for name in (f"kafka-{jars.KAFKA_VERSION}", jars.REGISTRY_FOLDER):
        (cache / name).symlink_to(jars.cache_folder() / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert archives.missing()
    return cache


def java_of(folder: Path) -> list[psutil.Process]:
    """Servers, guards and recorders whose command line or environment names a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def archives_of(cache: Path) -> set[str]:
    """The kinds of the whole archives, and whatever else a recorder has left."""
    names = {path.name for path in (cache / "archives").iterdir()}
    return {
        name.partition("-")[0] if name.endswith(".aot") else name
        for name in names - {"recording.lock", "recording.log"}
    }


@pytest.mark.parametrize("lasting", [False, True])
def test_a_damaged_archive_is_ignored(cache: Path, tmp_path: Path, lasting: bool) -> None:
    pins, java = jars.load_pins(), jars.java()
    for name, kind in KINDS.items():
        path = kind.class_path(pins, cache)
        run = runtime.prepare(name, java, path, kind.heap, cache, may_record=False)
        run.archive.write_bytes(os.urandom(100_000))
    assert not archives.missing()

    state = tmp_path / "state"
    try:
        stack = up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid(), lasting=lasting)
        used = [psutil.Process(pid).cmdline() for pid in (stack.kafka_pid, stack.registry_pid)]
    finally:
        down(state, wipe=True)

    assert all(any("AOTCache=" in word for word in command) for command in used)
    quick = ["-XX:TieredStopAtLevel=1" in command for command in used]
    assert quick == [not lasting, True]


def test_a_second_recorder_leaves_the_work_to_the_first(cache: Path) -> None:
    folder = runtime.archives_folder(cache)
    folder.mkdir(exist_ok=True)
    with processes.locked(folder / "recording.lock", 1.0):
        assert not archives.record()
    assert archives_of(cache) == set()


@pytest.mark.long
def test_a_killed_recorder_leaves_no_process_and_the_next_one_records(cache: Path) -> None:
    killed = subprocess.Popen(RECORDER)
    deadline = time.monotonic() + BOUND_S
    while not any("java" in one.name() for one in java_of(cache / "archives")):
        assert time.monotonic() < deadline, "the recorder has started no server"
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while java_of(cache / "archives"):
        assert time.monotonic() < deadline, "the guard has not ended the servers"
        time.sleep(0.1)
    assert archives.missing()

    both = [subprocess.Popen(RECORDER) for _ in range(2)]
    assert [one.wait(BOUND_S) for one in both] == [0, 0]

    assert not archives.missing()
    assert archives_of(cache) == {"kafka", "registry"}
    assert java_of(cache / "archives") == []

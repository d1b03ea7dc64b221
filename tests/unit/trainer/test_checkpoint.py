"""Checkpoints: whole or not at all, whatever dies when."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import DependencyError
from headrace.services.base.files import file_digest
from headrace.trainer import checkpoint as module
from headrace.trainer.checkpoint import MANIFEST, STATE, Checkpoint, Checkpoints


def everything(checkpoint: Checkpoint) -> bool:
    return True


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def save(checkpoints: Checkpoints, version: int) -> Checkpoint:
    checkpoint = Checkpoint(version, 10 * version, bytes([version]) * 32)
    checkpoints.save(checkpoint, lambda path: _write(path, b"state %d" % version))
    return checkpoint


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "p", keep=2)
    assert checkpoints.newest(everything) is None
    for version in (9, 10, 11):
        saved = save(checkpoints, version)

    found = checkpoints.newest(everything)

    assert found is not None
    assert found[0] == saved
    assert found[1].read_bytes() == b"state 11"
    assert len(list((tmp_path / "p").iterdir())) == 2


@pytest.mark.parametrize("file", [STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "emptied"])
def test_a_damaged_one_is_skipped_with_a_warning(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    older = save(checkpoints, 1)
    save(checkpoints, 2)
    path = tmp_path / "v000000000002" / file
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(b"[" + data[1:])
        case "emptied":
            path.write_bytes(b"")
        case "gone":
            path.unlink()

    found = checkpoints.newest(everything)

    assert found is not None
    assert found[0] == older
    assert "damaged" in caplog.text


def test_one_of_another_log_is_skipped_and_may_be_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3)
    assert checkpoints.newest(lambda found: found.digest == bytes(32)) is None
    assert "not of this log" in caplog.text
    made, newest = save(checkpoints, 3), checkpoints.newest(everything)
    assert newest is not None
    assert made == newest[0]


def test_one_of_another_log_crowds_out_none_of_this_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    foreign = save(checkpoints, 9)
    for version in (1, 2, 3):
        save(checkpoints, version)
    found = checkpoints.newest(lambda one: one != foreign)
    assert found is not None
    assert found[0].version == 3
    assert checkpoints.versions() == [9, 3, 2]


def test_a_disk_that_takes_nothing_is_a_dependency_and_keeps_the_old(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    older = save(checkpoints, 1)

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DependencyError, match="No space left"):
        checkpoints.save(Checkpoint(2, 20, bytes(32)), full)

    assert [path.name for path in tmp_path.iterdir()] == ["v000000000001"]
    newest = checkpoints.newest(everything)
    assert newest is not None
    assert newest[0] == older


def test_it_is_there_when_it_is_completed_in_another_thread(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    older = save(checkpoints, 1)
    made = Checkpoint(2, 20, bytes(32))
    complete = checkpoints.write(made, lambda path: _write(path, b"state 2"))
    found = checkpoints.newest(everything)
    assert found is not None
    assert found[0] == older
    with ThreadPoolExecutor(1) as thread:
        thread.submit(complete).result()
    found = checkpoints.newest(everything)
    assert found is not None
    assert (found[0], found[1].read_bytes()) == (made, b"state 2")
    assert [path.name for path in tmp_path.iterdir()] == ["v000000000002"]


def test_files_of_several_processes_are_hashed_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3, timeout=60)

    def digest(path: Path) -> bytes:
        together.wait()
        return file_digest(path)

    monkeypatch.setattr(module, "file_digest", digest)

    def write(path: Path) -> None:
        path.mkdir()
        for rank in range(3):
            (path / f"{rank}.distcp").write_bytes(b"%d" % rank)

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Checkpoint(1, 10, bytes(32), processes=3), write)
    monkeypatch.undo()
    assert checkpoints.newest(everything) is not None
    files = tmp_path / "v000000000001" / "state"
    (files / "1.distcp").write_bytes(b"x")
    assert checkpoints.newest(everything) is None


def test_an_interrupted_one_takes_no_room_of_the_next(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    for name in ("partial-a", "partial-b"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "shard").write_bytes(b"half")
    beside: list[str] = []

    def look(path: Path) -> None:
        beside.extend(one.name for one in tmp_path.iterdir() if one != path.parent)
        path.write_bytes(b"state 2")

    checkpoints.save(Checkpoint(2, 20, bytes(32)), look)
    assert beside == ["v000000000001"]


KILLED_AT_EVERY_STEP = """
import os, sys, pathlib
from headrace.trainer.checkpoint import Checkpoint, Checkpoints
root = pathlib.Path(sys.argv[1])

def save(folder, version):
    made = Checkpoint(version, version, bytes([version]) * 32)
    Checkpoints(folder, keep=2).save(made, lambda path: path.write_bytes(b"%d" % version) and None)

def die_at(step, folder):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if arguments and str(folder) in str(arguments[0]):
            seen += 1
            if seen == step:
                os._exit(137)
    sys.addaudithook(hook)

died, code = 0, 137
while code == 137:
    folder = root / str(died)
    for version in (1, 2):
        save(folder, version)
    child = os.fork()
    if not child:
        die_at(died + 1, folder)
        save(folder, 3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    died += code == 137
assert code == 0, code
print(died)
"""


def test_killed_at_any_step_the_old_or_the_new_is_whole(tmp_path: Path) -> None:
    """A process is killed before its first file operation, its second, ... until it survives."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 8

    versions = []
    for step in range(steps):
        checkpoints = Checkpoints(tmp_path / str(step), keep=2)
        found = checkpoints.newest(everything)
        assert found is not None
        version = found[0].version
        assert found[1].read_bytes() == b"%d" % version
        versions.append(version)
        save(checkpoints, 4)
        assert len(list((tmp_path / str(step)).iterdir())) == 2, "what the dead left is gone"
    assert set(versions) == {2, 3}
    assert versions == sorted(versions)

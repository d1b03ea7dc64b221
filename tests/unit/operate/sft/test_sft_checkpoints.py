"""The folder of the checkpoints may have other things, which stay."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.services.operate.sft.command import sft
from headrace.services.operate.sft.sft_checkpoints import (
    check_checkpoints,
    drop_checkpoints,
    sole_writer,
)
from headrace.services.operate.track.tracker import lock_output

LOCK = "headrace.services.operate.sft.sft_checkpoints.lock_output"


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "made.checkpoints"
    for name in ("v000000000003", "partial-x", "vacation"):
        (folder / name).mkdir(parents=True)
    (folder / "v000000000003" / "state").touch()
    check_checkpoints(folder)
    drop_checkpoints(folder)
    assert [one.name for one in folder.iterdir()] == ["vacation"]
    with pytest.raises(UsageError, match="has no checkpoints"):
        check_checkpoints(folder)
    (folder / "vacation").rmdir()
    check_checkpoints(folder)
    drop_checkpoints(folder)
    assert not folder.exists()


def test_a_command_that_is_refused_leaves_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = tmp_path / "made.checkpoints" / "v000000000003"
    checkpoint.mkdir(parents=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    told = ["quickstart", str(rows), "--to", str(tmp_path / "made"), "--restart", "--quiet"]
    with pytest.raises(UsageError, match="1 rows can't be learned"):
        CliRunner().invoke(sft, told, catch_exceptions=False)
    assert checkpoint.exists()


def test_a_second_command_with_the_same_target_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    told = ["quickstart", str(rows), "--to", str(tmp_path / "made"), "--quiet"]
    said: list[str] = []
    with sole_writer(tmp_path / "made", said.append):
        with pytest.raises(UsageError, match="another process writes"):
            CliRunner().invoke(sft, told, catch_exceptions=False)
        with sole_writer(tmp_path / "other", said.append):
            pass
    with pytest.raises(UsageError, match="1 rows can't be learned"):
        CliRunner().invoke(sft, told, catch_exceptions=False)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]
    assert not said


def test_a_file_that_another_process_has_just_removed_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain, opened = tmp_path / "made.lock", lock_output, list[Path]()

    def late(file: BinaryIO, folder: Path) -> None:
        if not opened:
            path.unlink()
        opened.append(folder)
        plain(file, folder)

    monkeypatch.setattr(LOCK, late)
    with (
        sole_writer(tmp_path / "made", lambda line: None),
        pytest.raises(UsageError, match="another process writes"),
        sole_writer(tmp_path / "made", lambda line: None),
    ):
        pass
    assert len(opened) == 3


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: BinaryIO, folder: Path) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(LOCK, refuse)
    said: list[str] = []
    with sole_writer(tmp_path / "made", said.append):
        assert "made.lock can't be locked: No locks available" in said[0]

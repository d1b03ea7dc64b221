"""The folder of the checkpoints may have other things, which stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.services.operate.sft.command import sft
from headrace.services.operate.sft.sft_checkpoints import check_checkpoints, drop_checkpoints


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

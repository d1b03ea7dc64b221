"""What `headrace doctor` finds on a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.services.operate.doctor.machine_checks import disks
from headrace.services.operate.waits.side_watch import STATE


def test_a_state_folder_that_can_not_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert [one.state for one in disks({STATE: tmp_path / "new" / "folder"})] != ["problem"]
    assert "can't write" in next(disks({STATE: tmp_path / "file" / "x"})).text
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    [found] = disks({STATE: tmp_path})
    assert (found.state, "can't write there" in found.text) == ("problem", True)
    assert [one.state for one in disks({"blob store": tmp_path})] != ["problem"]

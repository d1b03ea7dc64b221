"""A file that appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import DependencyError
from headrace.services.operate.trajectories.whole_file import whole_file


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "log.eval"
    with whole_file(file) as unfinished:
        unfinished.write_text("new")
        assert (unfinished.parent, unfinished.suffix, file.exists()) == (tmp_path, ".eval", False)
    assert [one.name for one in tmp_path.iterdir()] == ["log.eval"]
    assert file.read_text() == "new"


@pytest.mark.parametrize(
    ("error", "seen"), [(OSError("the disk is full"), DependencyError), (ValueError(), ValueError)]
)
def test_a_failure_keeps_the_file_of_before(
    error: Exception, seen: type[Exception], tmp_path: Path
) -> None:
    file = tmp_path / "log.eval"
    file.write_text("old")

    def fail() -> None:
        with whole_file(file) as unfinished:
            unfinished.write_text("half")
            raise error

    with pytest.raises(seen):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == ["log.eval"]
    assert file.read_text() == "old"

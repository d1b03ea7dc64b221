from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.base.files import describe_log, make_private
from headrace.services.namespace.cluster_config import write_resolved


def test_log_is_described_by_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "kafka.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))

    described = describe_log(log)

    assert described.startswith(f"the last lines of {log}:")
    assert described.splitlines()[1:] == [f"  line {number}" for number in range(80, 100)]
    assert "(nothing)" in describe_log(tmp_path / "absent.log")


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_folders_that_headrace_makes_are_private_and_others_stay(
    tmp_path: Path, umask: int
) -> None:
    recipe = parse_recipe({"name": "r", "policies": {"default": {"model": "m"}}}, "r")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    before = os.umask(umask)
    try:
        assert write_resolved(recipe, tmp_path / "state").is_file()
        make_private(shared)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("state", "shared")]
    assert modes == [0o700, 0o755]

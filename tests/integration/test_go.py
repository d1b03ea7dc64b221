"""The reader of results in Go works on a run, with franz-go and hamba/avro."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.infra import local
from tests.commands import cluster_variables
from tests.integration.test_other_teams import RECIPE, headrace
from tests.unit.test_architecture import ROOT

BUILD_S = 600.0
"""A build with an empty cache fetches and compiles all modules."""
READ_S = 120.0


@pytest.mark.long
@pytest.mark.skipif(shutil.which("go") is None, reason="this machine has no Go")
def test_go_reads_results(tmp_path: Path, local_stack: local.LocalStack, namespace: str) -> None:
    program = tmp_path / "results"
    subprocess.run(
        ["go", "build", "-buildvcs=false", "-o", str(program), "."],
        cwd=ROOT / "examples/go",
        env={**os.environ, "GOFLAGS": "-mod=readonly"},
        check=True,
        timeout=BUILD_S,
    )
    headrace(("run", *RECIPE), cluster_variables(local_stack, namespace, tmp_path))
    where = (local_stack.bootstrap_servers, local_stack.registry_url, namespace)
    printed = subprocess.run(
        [str(program), *where, "2"], check=True, capture_output=True, text=True, timeout=READ_S
    ).stdout
    lines = [line.partition(":") for line in printed.splitlines()]
    assert len(lines) >= 2
    assert all(int(task) >= 0 for task, _, _ in lines)
    # What the end of the run cancelled has no reward.
    found = [one for _, _, rewards in lines for one in rewards.split() if one != "null"]
    assert found
    assert all(0.0 <= float(one) <= 1.0 for one in found)

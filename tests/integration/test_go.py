"""The examples in Go submit, judge and read in a run, with franz-go and hamba/avro."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.infra import local
from tests.integration.test_judges import Programs, submit_and_judge
from tests.unit.test_architecture import ROOT

BUILD_S = 600.0
"""A build with an empty cache fetches and compiles all modules."""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("go") is None, reason="this machine has no Go")
def test_go_submits_judges_and_reads(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    folder = tmp_path / "programs"
    subprocess.run(
        ["go", "build", "-buildvcs=false", "-o", f"{folder}/", "./..."],
        cwd=ROOT / "examples/go",
        env={**os.environ, "GOFLAGS": "-mod=readonly"},
        check=True,
        timeout=BUILD_S,
    )
    judge, reader, submit = ([str(folder / name)] for name in ("judge", "results", "submit"))
    submit_and_judge(Programs(judge, reader, submit), local_stack, namespace, tmp_path)

"""The judge and the reader of results in Go work in a run, with franz-go and hamba/avro."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.infra import local
from tests.integration.test_judges import judge_and_read
from tests.unit.test_architecture import ROOT

BUILD_S = 600.0
"""A build with an empty cache fetches and compiles all modules."""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("go") is None, reason="this machine has no Go")
def test_go_judges_and_reads(tmp_path: Path, local_stack: local.LocalStack, namespace: str) -> None:
    programs = tmp_path / "programs"
    subprocess.run(
        ["go", "build", "-buildvcs=false", "-o", f"{programs}/", "./..."],
        cwd=ROOT / "examples/go",
        env={**os.environ, "GOFLAGS": "-mod=readonly"},
        check=True,
        timeout=BUILD_S,
    )
    judge, reader = ([str(programs / name)] for name in ("judge", "results"))
    judge_and_read(judge, reader, local_stack, namespace, tmp_path)

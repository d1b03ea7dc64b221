"""Workers on a host that allows less than the recipe asks for, or that has no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headrace.infra import local
from tests.commands import cluster_variables

RECIPE = """
name = "ceilings"
partitions = 1

[environments.default]
use = "docker"
options = { image = "python:3.12-slim", memory_mb = 512 }

[agents.default]
use = "command"
options = { command = ["a"], judge = "default", container = { image = "i", memory_mb = 512 } }

[policies.default]
model = "tiny-llama"
training = false
engine = { use = "scripted" }
"""


WHOSE = {
    "env": "environments.default.options",
    "agent": "option container of agent 'command'",
}


def test_a_worker_whose_host_is_not_fit_says_so_and_ends(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe, ceilings = tmp_path / "recipe.toml", tmp_path / "ceilings.toml"
    recipe.write_text(RECIPE)
    environment = {
        **os.environ,
        **cluster_variables(local_stack, namespace, tmp_path / "state"),
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
    }

    def headrace(*arguments: str, code: int) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    headrace("apply", str(recipe), code=0)  # on another host, which has no ceilings
    environment["HEADRACE_SANDBOX_CEILINGS"] = str(ceilings)
    ceilings.write_text("memory_mb = 256")
    for service, whose in WHOSE.items():
        assert (
            f"error: {whose}: memory_mb = 512 is beyond the ceiling memory_mb = 256, which the "
            f"operator of this host sets in {ceilings}"
        ) in headrace("serve", service, str(recipe), code=2)
    ceilings.write_text("memory_mb = 512")
    said = headrace("serve", "agent", str(recipe), code=75)
    assert f"error: {WHOSE['agent']}: the Docker engine at" in said

"""A finished run that several files of tests read."""

from __future__ import annotations

import os

import pytest

from headrace.infra import local
from tests.commands import cluster_variables, run_command
from tests.unit.test_architecture import ROOT

RUN_S = 240.0
RECIPE = (
    *(str(ROOT / "tests/e2e/recipes/frozen-lake.toml"), "--set", "stop.versions=3"),
    *("--set", "workers.project_turns=1"),
    # Its prompts have roles and the markup of a template.
    *("--set", "agents.default.use=chat", "--set", "policies.default.model=tiny-chat"),
    *("--set", "agents.default.options.system=Go.", "--set", "tasks.max_tokens=64"),
)


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, local_stack: local.LocalStack
) -> dict[str, str]:
    """The environment of commands that see a finished run, with the namespace `exported`."""
    variables = {
        **os.environ,
        **cluster_variables(local_stack, "exported", tmp_path_factory.mktemp("state")),
    }
    done = run_command(("run", *RECIPE, "--no-check", "--quiet"), variables, timeout_s=RUN_S)
    assert done.returncode == 0, done.stderr
    return variables

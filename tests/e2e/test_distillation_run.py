"""A policy learns from the policy of another run, in a fifth of the episodes that rewards need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import read_recipe
from tests.commands import cluster_variables, run_command
from tests.e2e.harness import RECIPES

ROOT = RECIPES.parents[2]
EXAMPLE = ROOT / "examples" / "distillation" / "distillation.toml"
REWARD = 0.95
RUN_S = 600.0
"""A bound for a busy machine; on a quiet one a run takes a minute."""


@pytest.mark.long
def test_a_teacher_saves_four_episodes_of_five(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = {**os.environ, **cluster_variables(local_stack, state=tmp_path)}

    def learned(recipe: str, name: str, *settings: str) -> int:
        """Runs a recipe until its policy has REWARD. Returns the episodes that it trained on."""
        sets = [word for setting in settings for word in ("--set", setting)]
        command = ("run", recipe, "--namespace", name, "--json", "--quiet", "--check")
        done = run_command((*command, f"reward>={REWARD}", *sets), environment, timeout_s=RUN_S)
        assert done.returncode == 0, done.stderr[-3000:]
        summary: dict[str, Any] = json.loads(done.stdout)
        versions: int = summary["versions"]["default"]
        return versions * batch_of(read_recipe(recipe, settings))

    by_reward = learned("quickstart", namespace)
    teacher = f"policies.teacher.model=run:{namespace}/default"
    by_teacher = learned(str(EXAMPLE), f"{namespace}-taught", teacher)
    print(f"{by_reward} episodes by reward, {by_teacher} from a teacher")
    assert by_teacher <= by_reward / 5


def batch_of(recipe: Recipe) -> int:
    """The episodes of one batch."""
    return recipe.policies["default"].batches.groups * recipe.tasks.samples

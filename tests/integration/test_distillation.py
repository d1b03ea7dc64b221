"""A run whose policy has a teacher, on a real broker: recorded, trained on, shown and replayed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace import Client
from headrace.infra import local
from tests.commands import cluster_variables
from tests.integration.test_judges import BOUND_S, started
from tests.integration.test_other_teams import headrace

ITEMS, TURNS = 16, 3
RECIPE = f"""
name = "taught"
partitions = 2

[tasks]
options = {{ items = {ITEMS} }}
epochs = 1
samples = 1
max_turns = {TURNS}
max_tokens = 64

[environments.default]
options = {{ turns = {TURNS} }}

[policies.default]
model = "tiny-llama"

[policies.default.sampling]
temperature = 0.7
max_tokens = 4

[policies.default.batches]
groups = 8

[policies.default.training]
loss = "distill"
teacher = "teacher"

[policies.teacher]
model = "tiny-llama"
seed = 5
training = false
"""


@pytest.mark.long
def test_what_a_teacher_scores_is_recorded_trained_on_and_replayed(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = tmp_path / "taught.toml"
    recipe.write_text(RECIPE)
    environment = cluster_variables(local_stack, namespace, tmp_path)
    run = ("-m", "headrace", "run", str(recipe), "--json", "--quiet")
    with started(*run, **environment) as running:
        summary = json.loads(running.communicate(timeout=BOUND_S)[0])
    assert running.returncode == 0
    assert (summary["episodes"], summary["failures"]) == (ITEMS, 0)
    assert summary["versions"]["default"] >= ITEMS // 8

    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    with Client(servers, registry, namespace, state=tmp_path) as client:
        trajectories = list(client.trajectories())
    assert len(trajectories) == ITEMS
    for trajectory in trajectories:
        [path] = trajectory.paths()
        assert np.isfinite(path.teacher[path.sampled]).all()
        assert np.isnan(path.teacher[~path.sampled]).all()
        # Both are random, so they agree on nothing.
        assert (path.teacher[path.sampled] != path.logprobs[path.sampled]).all()

    # The policy may sample the token that ends a turn before it has four.
    (third,) = (one for one in trajectories if one.task == 3)
    [path] = third.paths()
    scored = f"score by teacher of {int(path.sampled.sum())} of"
    assert scored in headrace(("show", "3/0"), environment)
    replayed = json.loads(headrace(("replay", "batches", "--json"), environment))
    assert {(one["batch"], one["same"]) for one in replayed["versions"]} == {("same", True)}

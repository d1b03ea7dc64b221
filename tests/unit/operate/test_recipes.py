"""The recipes that ship: every name in them is one that there is, and their limits meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.recipe.read_recipe import load_recipe
from headrace.services.agent.agents import BUILTIN as AGENTS
from headrace.services.base.plugins import load, load_with_options
from headrace.services.env.libraries.libraries_child import LIBRARIES
from headrace.services.env.service import BUILTIN as ENVIRONMENTS
from headrace.services.inference.service import BUILTIN as ENGINES
from headrace.services.namespace.cluster_config import RECIPES
from headrace.services.tasks.data_sets import BUILTIN as DATA_SETS
from headrace.stream_jobs.filters import FILTERS
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.trainer.losses.load_loss import load_loss


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_name_in_a_shipped_recipe_is_there(path: Path) -> None:
    recipe = load_recipe(path.stem, shipped=RECIPES)
    load("data set", recipe.tasks.use, DATA_SETS)
    if recipe.evaluation is not None and recipe.evaluation.use is not None:
        load("data set", recipe.evaluation.use, DATA_SETS)
    for agent in recipe.agents.values():
        load("agent", agent.use, AGENTS)
    for environment in recipe.environments.values():
        load("environment", environment.use, {**ENVIRONMENTS, **LIBRARIES})
    for policy in recipe.policies.values():
        assert policy.engine.use in ENGINES
        load_advantage(policy.groups.advantage)
        for each in policy.groups.filters:
            load_with_options("filter", each, FILTERS)
        if policy.training is not None:
            load_loss(policy.training.loss)


def test_a_problem_and_its_answer_fit_wherever_qwen3_takes_them() -> None:
    recipe = load_recipe("qwen3-0-6b-vllm", shipped=RECIPES)
    policy = recipe.policies["default"]
    assert policy.training is not None
    assert recipe.evaluation is not None
    # The longest of 2,000 problems has 154 tokens of Qwen's tokenizer, the system message 27.
    longest = 256 + policy.sampling.max_tokens
    assert policy.sampling.max_tokens < recipe.tasks.max_tokens  # a cut answer is scored as one
    assert longest <= policy.training.max_tokens  # else a micro-batch would be larger than it says
    assert longest <= policy.engine.options["context"]
    assert recipe.tasks.options["dataset"] == recipe.evaluation.options["dataset"]
    assert recipe.evaluation.options["seed"] > recipe.tasks.options["size"]

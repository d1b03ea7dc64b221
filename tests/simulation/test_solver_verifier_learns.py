"""Both policies of the shipped workflow `solver-verifier` learn, with several seeds, without Kafka.

The recipe's own agent, environment, engines, groups and trainers are used.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from statistics import fmean

import pytest

from headrace.services.namespace.cluster_config import read_recipe
from tests.bench.learning import LockstepLoop

WORKFLOW = Path(__file__).parents[2] / "examples" / "workflows" / "solver-verifier.toml"
SEEDS = range(int(os.environ.get("HEADRACE_SEEDS", "3")))
MOST_VERSIONS = 120


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_both_policies_learn(tmp_path: Path, seed: int) -> None:
    """A minute on a free core. Before, a verifier that became certain too soon needed up to 200."""
    sets = (f"policies.solver.seed={2 * seed}", f"policies.verifier.seed={2 * seed + 1}")
    recipe = read_recipe(str(WORKFLOW), [*sets, f"tasks.seed={seed}"])
    width, goal = recipe.stop.reward_versions, recipe.stop.reward
    assert goal is not None

    def enough(rewards: list[dict[str, float]]) -> bool:
        newest = rewards[-width:]
        means = [fmean(one[name] for one in newest) for name in recipe.policies] if newest else []
        return len(newest) == width and min(means) >= goal

    rewards = asyncio.run(LockstepLoop(recipe, tmp_path, 1).run(MOST_VERSIONS, enough))
    for name in recipe.policies:
        found = [fmean(one[name] for one in part) for part in (rewards[:width], rewards[-width:])]
        print(f"seed {seed}: {name} {found[0]:.2f} to {found[1]:.2f} in {len(rewards)} versions")
    assert enough(rewards)

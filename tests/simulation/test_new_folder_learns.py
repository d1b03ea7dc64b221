"""The recipe of `headrace new` learns within few versions, without Kafka.

Its own agent, environment, engine, groups and trainer are used.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import fmean

import pytest

from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.new.new_folder import make_folder
from tests.bench.learning import LockstepLoop

MOST_VERSIONS = 27
"""27 seeds needed at most 21. With one update of 4e-3 for each batch these two needed 46 and 35."""


@pytest.mark.long
@pytest.mark.parametrize("seed", [5, 22])
def test_a_new_folder_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    folder, weights = tmp_path / "new", tmp_path / "weights"
    make_folder(folder)
    weights.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    recipe = read_recipe("recipe.toml", [f"policies.default.seed={seed}", f"tasks.seed={seed}"])
    width, goal = recipe.stop.reward_versions, recipe.stop.reward
    assert goal is not None

    def enough(rewards: list[dict[str, float]]) -> bool:
        newest = [one["default"] for one in rewards[-width:]]
        return len(newest) == width and fmean(newest) >= goal

    rewards = asyncio.run(LockstepLoop(recipe, weights, 2).run(MOST_VERSIONS, enough))
    assert enough(rewards)

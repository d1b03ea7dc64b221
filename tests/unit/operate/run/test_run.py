"""How a run of one machine ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.schemas.events import RunStateEntered
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.run.run import LocalRun

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})


def test_a_recorded_end_is_used_once_the_whole_log_is_read(tmp_path: Path) -> None:
    """Otherwise its summary would be empty, and all its tasks would seem to have ended."""
    ending = RunStateEntered(namespace="r", state="ending", digest=RECIPE.digest, reason="a rule")

    async def test() -> None:
        run = LocalRun(RECIPE, ClusterConfig(state=tmp_path), quiet=True)
        reason = asyncio.create_task(run._until_stop(RunLife(ending=ending)))
        await asyncio.sleep(0.05)
        assert not reason.done()

        run._changed.set()  # caught up
        assert await asyncio.wait_for(reason, 10) == "a rule"

    asyncio.run(test())

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.schemas.events import RunStateEntered
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import Where
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.run.live_view import QuietView, Status
from headrace.services.operate.run.progress import Progress
from headrace.services.operate.run.run import Run, RunOptions
from headrace.services.operate.run.supervisor import Supervisor

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})


def test_an_end_on_record_is_taken_up_once_the_whole_log_is_read(tmp_path: Path) -> None:
    """Else its summary would be empty, and all its tasks would seem to have ended."""
    ending = RunStateEntered(namespace="r", state="ending", digest=RECIPE.digest, reason="a rule")

    async def test() -> None:
        run = Run(RECIPE, Where(state=tmp_path), RunOptions(), Status("r"), QuietView())
        reason = asyncio.create_task(
            run._until_stop(
                RunLife(ending=ending), Progress(RECIPE), Supervisor([], tmp_path), beside=()
            )
        )
        await asyncio.sleep(0.05)
        assert not reason.done()

        run._changed.set()  # caught up
        assert await asyncio.wait_for(reason, 10) == "a rule"

    asyncio.run(test())

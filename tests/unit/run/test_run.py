from __future__ import annotations

import asyncio
from pathlib import Path

from schemas.events import RunStateEntered
from schemas.recipe import Recipe
from services.run.life import RunLife
from services.run.progress import Progress
from services.run.run import Run, RunOptions
from services.run.supervisor import Supervisor
from services.run.view import QuietView, Status
from services.settings import Where

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

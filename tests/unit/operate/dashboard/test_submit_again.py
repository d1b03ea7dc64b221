"""A task that is submitted again in the dashboard: the copy is signed, so it must be true."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import TaskSubmitted
from headrace.schemas.recipe.recipe import Scheduler
from headrace.schemas.topics import TASKS
from headrace.services.log.signatures import public_text
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.dashboard.actions import DashboardActions
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from tests.unit.log.test_request_signatures import FORGERIES, OPERATOR, TEAM, Scene, mine
from tests.unit.scheduler.test_core import recipe


def test_a_forged_task_gets_no_signature_by_being_submitted_again() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        for number, forge in enumerate(FORGERIES):
            await scene.broker.send(forge(scene, mine(number)))
        await scene.log(TEAM).send(mine(len(FORGERIES)))

        async def writing_log(topics: Any) -> Any:
            return scene.log(OPERATOR)

        tenants = {"team": {"keys": [public_text(TEAM)]}}
        keys = Scheduler.model_validate({"tenants": tenants, "operators": [public_text(OPERATOR)]})
        actions = DashboardActions(
            cast("Any", SimpleNamespace(writing_log=writing_log)),
            ClusterConfig(Path(), "", ""),
            recipe().model_copy(update={"scheduler": keys}),
            FactReader(scene.log()),
        )
        for number in range(len(FORGERIES)):
            with pytest.raises(UsageError, match="was refused, so it is not submitted again"):
                await actions.run("again", {"task": number})
        done = await actions.run("again", {"task": len(FORGERIES)})
        assert done["task"] == len(FORGERIES) + 1
        asked = {"task": len(FORGERIES), "request": "0123456789abcdef"}
        for _ in range(2):  # A browser repeats a request whose connection was lost.
            await actions.run("again", asked)
        first, second = (one.event for one in (await scene.read(TASKS))[-2:])
        assert isinstance(first, TaskSubmitted)
        assert second == first
        assert first.task_id == f"{len(FORGERIES)}-again-0123456789abcdef"
        with pytest.raises(UsageError, match="request: give 8 to 64"):
            await actions.run("again", {"task": len(FORGERIES), "request": "x/../"})

    asyncio.run(main())

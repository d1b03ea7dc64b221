"""The versions of a run whose policies are not all trained."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.find_versions import _versions, pick
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

POLICY = {"model": "tiny-llama"}
RECIPE = Recipe.model_validate(
    {
        "name": "n",
        "tasks": {"roles": {"policy": "solver", "judge": "judge"}},
        "policies": {"solver": POLICY, "judge": {**POLICY, "training": False}},
    }
)


def test_a_whole_run_at_a_version_has_the_only_version_of_what_is_not_trained() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        log = await connection.writing_log(topics_of(RECIPE, "n"))
        await apply(log, RECIPE)
        for policy, version in (("solver", 0), ("judge", 0), ("solver", 1), ("solver", 2)):
            status: Any = "trained" if version else "initial"
            await log.send(
                PolicyPublished(
                    policy=policy, version=version, status=status, digest=bytes(32),
                    full_version=version, base="b",
                )
            )  # fmt: skip
        cluster = ClusterConfig(namespace="n")

        async def found(version: int, *, whole_run: bool) -> dict[str, int]:
            versions = await _versions(connection, cluster, "n", version, print, whole_run)
            return {name: pick(versions, name, version).published.version for name in versions}

        assert await found(1, whole_run=True) == {"solver": 1, "judge": 0}
        with pytest.raises(UsageError, match="'judge' of the run has published no version 1"):
            await found(1, whole_run=False)
        with pytest.raises(UsageError, match="'solver' of the run has published no version 3"):
            await found(3, whole_run=True)
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))

"""The folder of a run on this machine: another cluster may have a run of the same name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.serve.open_context import open_context
from headrace.services.worker.service_context import ServiceContext
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})


class NamedBroker(MemoryBroker):
    """A broker of its own cluster."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._cluster_name = name

    async def cluster_id(self) -> str:
        return self._cluster_name


async def opened(state: Path, cluster_id: str) -> ServiceContext:
    broker = NamedBroker(cluster_id)
    topics = topics_of(RECIPE, "run")
    await broker.create_topics({one.name: (one.partitions, {}) for one in topics})
    connection = Connection(broker, MemoryRegistry(), "test")  # type: ignore[arg-type]
    never = asyncio.Event()
    cluster = ClusterConfig(state, namespace="run")
    return await open_context(connection, RECIPE, cluster, never, never, never)


def test_runs_of_one_name_on_two_clusters_share_no_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        ours = [await opened(tmp_path, "a") for _ in range(2)]
        theirs = await opened(tmp_path, "../b")
        assert ours[0].state == ours[1].state != theirs.state
        for one in (*ours, theirs):
            assert one.state.is_dir()
            assert one.state.resolve().parent == tmp_path.resolve() / "run"

    asyncio.run(main())

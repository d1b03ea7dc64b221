"""What chaos harms, made and working: servers, namespace, services, disks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from tests.chaos.disks import MIB, Disk
from tests.chaos.fleet import Clocks, Fleet
from tests.chaos.injections import World, write_rates
from tests.chaos.servers import Cluster
from tests.chaos.watch import Watch

logger = logging.getLogger("chaos")

NAMESPACE = "chaos"
START_S = 240.0
DISK_BYTES = {"blobs": 4096 * MIB, "checkpoints": 64 * MIB}
BROKER_DISK_BYTES = 6144 * MIB


@asynccontextmanager
async def deployed(
    folder: Path, brokers: int, *, disks: bool, policies: int = 1
) -> AsyncIterator[tuple[World, EventLog]]:
    """Servers, services and disks, working. `policies`: 1, or 2 with a barrier between them."""
    state = folder / "state"
    rates = folder / "rates.json"
    write_rates(rates, {})
    async with AsyncExitStack() as stack:
        cluster = Cluster(folder, brokers)
        made = _disks(folder, cluster, brokers) if disks else {}
        for disk in made.values():
            disk.folder.mkdir(parents=True)
            disk.mount()
            stack.callback(disk.unmount)
        stack.push_async_callback(cluster.close)
        logger.info("starting the servers")
        await cluster.start()
        where = where_in(state, cluster.bootstrap_servers, cluster.registry_url)
        recipe = _recipe(rates, policies)
        log = await _applied(stack, cluster, where, recipe)
        clocks = Clocks(folder / "clocks")
        clocks.prepare()
        fleet = Fleet(recipe, where, folder / "logs")
        watch = Watch(log)
        following = watch.follow(log.broker, log.topics)
        stack.callback(following.cancel)
        stack.push_async_callback(fleet.close)
        logger.info("starting the services")
        await fleet.start()
        assert await watch.comes_true(lambda: watch.version >= 2, START_S), "nothing is trained"
        yield World(cluster, fleet, watch, clocks, rates, made), log


async def _applied(
    stack: AsyncExitStack, cluster: Cluster, where: ClusterConfig, recipe: Recipe
) -> EventLog:
    """The namespace, made; its log, by the door that nothing troubles."""
    direct = where_in(where.state, cluster.direct, cluster.registry_url)
    connection = await stack.enter_async_context(connect(direct, "operator-0"))
    log = await connection.writing_log(Topics(NAMESPACE, tuple(recipe.policies), recipe.partitions))
    await apply(log, recipe)
    return log


def where_in(state: Path, bootstrap_servers: str, registry_url: str) -> ClusterConfig:
    return ClusterConfig(state, bootstrap_servers, registry_url, namespace=NAMESPACE)


def _disks(folder: Path, cluster: Cluster, brokers: int) -> dict[str, Disk]:
    state = folder / "state"
    own = ClusterConfig(state).cluster_folder(NAMESPACE, cluster.cluster_id)
    disks = {
        "blobs": Disk(state / "blobs", DISK_BYTES["blobs"]),
        "checkpoints": Disk(own / "checkpoints", DISK_BYTES["checkpoints"]),
    }
    for number in range(1, brokers + 1):
        disks[f"broker-{number}"] = Disk(cluster.data(number), BROKER_DISK_BYTES)
    return disks


def _recipe(rates: Path, policies: int) -> Recipe:
    name = "recipe.toml" if policies == 1 else "two-policies.toml"
    engines = [f"policies.{policy}.engine" for policy in ("default", "rival")[:policies]]
    parts = ["environments.default", *engines]
    sets = [f"{part}.options.rates={rates}" for part in parts]
    return read_recipe(str(Path(__file__).parent / name), sets)

"""Opens a run for the dashboard, and serves it until it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection, connect
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.dashboard.actions import DashboardActions
from headrace.services.operate.dashboard.dashboard_api import DashboardApi
from headrace.services.operate.dashboard.dashboard_server import DashboardServer
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dashboard.waits_page import WaitsPage
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.serve.process_setup import schedule_as_batch
from headrace.services.operate.waits.side_watch import SideWatch

logger = logging.getLogger(__name__)

NICENESS = 10
"""A run goes first: the dashboard takes what the processors have left."""
INDEX_PROPERTIES = {
    "fetch.min.bytes": "1000000", "fetch.wait.max.ms": "500", "queued.max.messages.kbytes": "4096",
}  # fmt: skip
"""The index follows a run in few large steps. A fetch costs the broker and this process more than a
record in it does. What is fetched and can't be taken yet is fetched again, so it is little."""
PAGE_PROPERTIES = {"max.partition.fetch.bytes": "65536", "queued.max.messages.kbytes": "2048"}
"""A page reads a few records of many partitions. Reading ahead there cost twice the processor time
of what was asked for. A larger record comes nevertheless."""
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Address:
    """Where the dashboard listens."""

    host: str = "127.0.0.1"
    port: int = 0
    allowed_hosts: tuple[str, ...] = ()
    """Further names under which browsers reach it."""


async def serve_dashboard(
    cluster: ClusterConfig,
    address: Address,
    *,
    read_only: bool,
    say: Callable[[str], None],
    on_url: Callable[[str], None],
    stopping: asyncio.Event,
) -> None:
    """Serves a run until `stopping` is set.

    If the local stack of the run rests, this starts it, and stops it at the end. `on_url` gets the
    address with the token.
    """
    _give_way()

    async def work() -> None:
        async with (
            running_stack(cluster, say) as (_, located),
            connect(located, f"dashboard-{os.getpid()}") as connection,
            connect(_reading(located, INDEX_PROPERTIES), f"dashboard-index-{os.getpid()}") as index,
            connect(_reading(located, PAGE_PROPERTIES), f"dashboard-pages-{os.getpid()}") as pages,
        ):
            topics, life = await find_namespace(connection, cluster.namespace)
            log = connection.log(topics)
            named = replace(located, namespace=topics.namespace)
            await _serve(
                (connection, index, pages),
                *(named, log, life, address),
                read_only=read_only,
                on_url=on_url,
            )

    await _until(stopping, work())


def _give_way() -> None:
    """Lowers the priority of this process, and keeps it from interrupting others.

    Linux may weigh sessions against each other, and niceness only within one of them (`autogroup`
    in sched(7)). So this lowers the session's priority, too, if this process has begun it, as under
    `run --dashboard`. A terminal's session has other programs.
    """
    schedule_as_batch()
    with suppress(OSError):
        os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))


def _reading(cluster: ClusterConfig, properties: Mapping[str, str]) -> ClusterConfig:
    return replace(cluster, kafka_properties={**properties, **cluster.kafka_properties})


async def _serve(
    connections: tuple[Connection, Connection, Connection],
    cluster: ClusterConfig,
    log: EventLog,
    life: RunLife,
    address: Address,
    *,
    read_only: bool,
    on_url: Callable[[str], None],
) -> None:
    """`connections` are that of the actions, that of the index, and that of the pages."""
    recipe, (connection, index, pages) = life.recipe(), connections
    follower = IndexFollower(index.log(log.topics), recipe)
    reader = FactReader(pages.log(log.topics))
    blobs = cluster.open_blobs(None)
    api = DashboardApi(connection, cluster, follower, reader, blobs)
    actions = None if read_only else DashboardActions(connection, cluster, recipe, reader)
    waits = WaitsPage(log, recipe, SideWatch(cluster, log.topics.namespace, blobs))
    server = DashboardServer(api, actions, waits.tree)
    try:
        local = address.host in LOCAL_HOSTS
        on_url(await server.start(address.host, address.port, address.allowed_hosts, local))
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.follow())
            group.create_task(follower.follow_lags())
    finally:
        await server.aclose()
        await waits.aclose()
        if actions is not None:
            await actions.aclose()
        api.close()


async def _until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until `stopping` is set, or until it fails."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)

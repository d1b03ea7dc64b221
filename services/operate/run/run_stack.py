"""The broker and registry of a run: the user's own, or a local stack."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from headrace.errors import DependencyError, HeadraceError, Interrupted, UsageError
from headrace.infra import local
from headrace.services.kafka.broker import Broker
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import locate

WATCH_INTERVAL_S = 1.0


@dataclass
class RunStack:
    """Starts the local stack if the user names no cluster, repairs it, and stops what it started.

    A local stack that already runs is used, but neither repaired nor stopped.
    """

    cluster: ClusterConfig
    on_progress: Callable[[str], None]
    on_restart: Callable[[str], None]
    roles: Sequence[str] = ()
    """The roles of a secure stack that is started; none: it is as it was."""
    ours: bool = False
    """Whether this run started it."""

    async def up(self, interrupted: Callable[[], bool]) -> ClusterConfig:
        """Returns the addresses of broker and registry once they answer.

        Raises Interrupted, and leaves nothing behind, as soon as `interrupted()` is true.
        """
        if self.cluster.bootstrap_servers is not None:
            return locate(self.cluster)
        try:
            # In a thread, so that the loop can take the signal that interrupts the start.
            stack = await asyncio.to_thread(
                local.up,
                self.cluster.state,
                on_progress=self.on_progress,
                owner_pid=os.getpid(),
                cancelled=interrupted,
                lasting=True,
                roles=self.roles,
            )
        except local.Cancelled:
            raise Interrupted("interrupted before the run began") from None
        # A stack that was already there keeps its owner.
        self.ours = stack.owner_pid == os.getpid()
        return self.cluster.connected(
            stack.bootstrap_servers, stack.registry_url, stack.credentials
        )

    async def prepare_transactions(self, broker: Broker) -> None:
        """Lets a broker that this run started make what its first transaction needs.

        That takes a second, for which several services would wait.
        """
        if self.ours:
            with suppress(HeadraceError):  # The services will report it.
                await (await broker.fenced("headrace-run")).close()

    async def watch(self, connected: ClusterConfig) -> None:
        """Restarts a local broker or registry that died, with the same data and ports."""
        if not self.ours:
            await asyncio.Event().wait()  # Its owner repairs it.
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await asyncio.to_thread(local.find, self.cluster.state) is not None:
                continue
            self.on_restart("a part of the local stack died: starting it again")
            stack = await asyncio.to_thread(
                local.up, self.cluster.state, owner_pid=os.getpid(), lasting=True
            )
            if stack.bootstrap_servers != connected.bootstrap_servers:
                raise DependencyError(
                    f"the local broker moved to {stack.bootstrap_servers}, because another process "
                    f"uses {connected.bootstrap_servers}: run the same command again to continue"
                )

    async def down(self) -> None:
        """Stops the stack if this run started it."""
        if self.ours:
            await asyncio.to_thread(local.down, self.cluster.state)


@asynccontextmanager
async def running_stack(
    cluster: ClusterConfig, say: Callable[[str], None]
) -> AsyncIterator[tuple[RunStack, ClusterConfig]]:
    """Starts the local stack if the configuration names no cluster. Stops it if it started it.

    Yields the stack, and the configuration with its addresses. Raises UsageError if the state
    folder has never had a local stack, since then it holds no run either.
    """
    stack, interrupted = RunStack(cluster, on_progress=say, on_restart=say), threading.Event()
    if cluster.bootstrap_servers is None and not (cluster.state / "kafka").exists():
        raise UsageError(
            f"{cluster.state} holds no run. Give the folder of a run with --state, or name a "
            "cluster with --bootstrap-servers and --registry-url"
        )
    try:
        yield stack, await stack.up(interrupted.is_set)
    finally:
        interrupted.set()
        await stack.down()

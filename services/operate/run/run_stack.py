"""The run's broker and registry: the user's own, a stack that runs already, or one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from headrace.errors import DependencyError
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import locate

WATCH_INTERVAL_S = 1.0


class RunStack:
    """Brings the local stack up where none is named, mends it, and takes down what it began."""

    def __init__(
        self,
        cluster: ClusterConfig,
        *,
        on_progress: Callable[[str], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self._where = cluster
        self._on_progress = on_progress
        self._on_restart = on_restart
        self._local = cluster.bootstrap_servers is None
        self._ours = False

    def up(self) -> ClusterConfig:
        """Where broker and registry are, once they answer. Blocks.

        Ctrl-C raises KeyboardInterrupt, and leaves nothing behind.
        """
        if not self._local:
            return locate(self._where)
        from headrace.infra import local

        # The loop's own handler would wait for the loop, which this call blocks.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            stack = local.up(
                self._where.state,
                on_progress=self._on_progress,
                owner_pid=os.getpid(),
            )
        finally:
            signal.signal(signal.SIGINT, before)
        # One that was there already keeps its owner, and stays.
        self._ours = stack.owner_pid == os.getpid()
        return self._where.connected(stack.bootstrap_servers, stack.registry_url)

    async def watch(self, place: ClusterConfig) -> None:
        """Starts a local broker or registry again where one died, on the same log and ports."""
        if not self._ours:
            await asyncio.Event().wait()  # not this run's to mend
        from headrace.infra import local

        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await asyncio.to_thread(local.find, self._where.state) is not None:
                continue
            self._on_restart("the local stack died in part: starting it again")
            stack = await asyncio.to_thread(local.up, self._where.state, owner_pid=os.getpid())
            if stack.bootstrap_servers != place.bootstrap_servers:
                raise DependencyError(
                    f"the local broker is at {stack.bootstrap_servers} now, since another process "
                    f"took {place.bootstrap_servers}: run the same command again to go on"
                )

    async def down(self) -> None:
        """Takes the stack down where this run began it."""
        if self._ours:
            from headrace.infra import local

            await asyncio.to_thread(local.down, self._where.state)

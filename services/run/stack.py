"""The run's broker and registry: the user's own, a stack that runs already, or one of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from services.connect import locate
from services.errors import DependencyError, Interrupted
from services.settings import Where

WATCH_INTERVAL_S = 1.0


class Stack:
    """Brings the local stack up where none is named, mends it, and takes down what it began."""

    def __init__(
        self,
        where: Where,
        *,
        on_progress: Callable[[str], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self._where = where
        self._on_progress = on_progress
        self._on_restart = on_restart
        self._local = where.bootstrap_servers is None
        self._ours = False

    async def up(self, interrupted: Callable[[], bool]) -> Where:
        """Where broker and registry are, once they answer.

        Raises Interrupted, and leaves nothing behind, once `interrupted()`.
        """
        if not self._local:
            return locate(self._where)
        from infra import local

        try:
            # A thread: on this one, the loop could not take the signal that interrupts the start.
            stack = await asyncio.to_thread(
                local.up,
                self._where.state,
                on_progress=self._on_progress,
                owner_pid=os.getpid(),
                cancelled=interrupted,
            )
        except local.Cancelled:
            raise Interrupted("interrupted before the run began") from None
        # One that was there already keeps its owner, and stays.
        self._ours = stack.owner_pid == os.getpid()
        return self._where.connected(stack.bootstrap_servers, stack.registry_url)

    async def watch(self, place: Where) -> None:
        """Starts a local broker or registry again where one died, on the same log and ports."""
        if not self._ours:
            await asyncio.Event().wait()  # not this run's to mend
        from infra import local

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
            from infra import local

            await asyncio.to_thread(local.down, self._where.state)

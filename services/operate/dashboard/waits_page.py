"""What the run waits for. It is followed only once somebody has asked."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from headrace.errors import DependencyError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.clock import now
from headrace.services.log.event_log import EventLog
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.waits.side_watch import SideWatch
from headrace.services.operate.waits.waits_reader import WaitsReader

EVERY_S = 1.0
"""The graph is built at most once in this time."""


class WaitsPage:
    """The wait graph of one run."""

    def __init__(self, log: EventLog, recipe: Recipe, side: SideWatch) -> None:
        self._reader = WaitsReader(log, recipe, side)
        self._opening: asyncio.Task[None] | None = None
        self._newest: Tree = {"at": 0.0, "waits": []}

    async def tree(self) -> Tree:
        """Returns the graph. Raises DependencyError while it is not known."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._reader.open())
        if not self._opening.done():
            raise DependencyError(
                "what the run waits for is being read from the log: ask again in a second"
            )
        self._opening.result()
        if self._reader.obstacle:
            raise DependencyError(f"what the run waits for is not known: {self._reader.obstacle}")
        if now() >= self._newest["at"] + EVERY_S:
            waits = await self._reader.waits()
            self._newest = {"at": now(), "waits": [asdict(one) for one in waits]}
        return self._newest

    async def aclose(self) -> None:
        """Stops following."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._reader.aclose()

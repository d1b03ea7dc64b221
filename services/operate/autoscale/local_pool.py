"""Starts and drains the inference workers of `headrace run`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import Generic, Protocol, TypeVar

from headrace.errors import DependencyError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.operate.autoscale.autoscaler import Scaling
from headrace.services.operate.autoscale.follow_scaling import follow_scaling


class Spec(Protocol):
    """A process that can be started."""

    @property
    def name(self) -> str:
        """Its name, which only one process has."""


S = TypeVar("S", bound=Spec)
_Given = TypeVar("_Given", bound=Spec, contravariant=True)


class Children(Protocol[_Given]):
    """The processes of a run: `services/operate/run/supervisor.py`."""

    async def add(self, spec: _Given) -> None:
        """Starts a process, and keeps it alive."""

    def drain(self, name: str) -> None:
        """Asks a process to finish what it has and to end. May be called again."""

    def names(self, *, leaving: bool) -> list[str]:
        """Returns the names of the processes that were asked to drain, or of all others."""


AGAIN_S = 5.0
"""Seconds until the log is followed again, if the broker could not be reached."""


class LocalPool(Generic[S]):
    """The inference workers among a supervisor's children."""

    def __init__(
        self, supervisor: Children[S], specs: Sequence[S], say: Callable[[str], None]
    ) -> None:
        """`specs` are those of all workers that the pool may have."""
        self._supervisor = supervisor
        self._specs = specs
        self._say = say
        self._wanted: int | None = None

    async def follow(self, log: EventLog, recipe: Recipe) -> None:
        """Brings the pool to the wanted number of workers, again and again, without end.

        Does nothing if the recipe has no `workers.autoscale`, or the pool has no workers.
        """
        settings = recipe.workers.autoscale
        if settings is None or not self._specs:
            await asyncio.Event().wait()
            return
        while True:
            with suppress(DependencyError):  # The broker may be restarting.
                serving = len(self._serving()) if self._wanted is None else self._wanted
                async with aclosing(follow_scaling(log, recipe, settings, serving)) as scalings:
                    async for scaling in scalings:
                        await self._on_scaling(scaling)
            await asyncio.sleep(AGAIN_S)

    async def _on_scaling(self, scaling: Scaling) -> None:
        if self._wanted not in (None, scaling.wanted):
            self._say(f"{scaling.wanted} inference workers are wanted: {scaling.reason}")
        self._wanted = scaling.wanted
        await self.apply(scaling.wanted)

    def _serving(self) -> list[str]:
        names = {spec.name for spec in self._specs}
        return [name for name in self._supervisor.names(leaving=False) if name in names]

    async def apply(self, wanted: int) -> None:
        """Starts or drains workers, so that as many as `wanted` remain. The newest ones drain."""
        names = {spec.name for spec in self._specs}
        serving = self._serving()
        leaving = {name for name in self._supervisor.names(leaving=True) if name in names}
        for name in [*serving[max(wanted, 0) :], *leaving]:
            self._supervisor.drain(name)
        free = [one for one in self._specs if one.name not in leaving.union(serving)]
        for spec in free[: max(0, wanted - len(serving))]:
            await self._supervisor.add(spec)

"""Report the states of workers and sandboxes to the topic `instances`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

from headrace.errors import HeadraceError
from headrace.schemas.events import Event, InstanceStateEntered
from headrace.services.base.redactor import REDACTOR

logger = logging.getLogger(__name__)

WAITING = 10_000
"""Most states that wait to be sent. Further ones are dropped: no decision depends on them."""
DRAIN_S = 2.0
"""Seconds that waiting states have to be sent when the worker stops."""

Kind = Literal["worker", "sandbox"]
State = Literal["provisioning", "ready", "busy", "failed", "gone"]


class Instances:
    """Queues states without blocking, and sends them one after another while `reporting`."""

    def __init__(self, send: Callable[[Event], Awaitable[object]], worker: str) -> None:
        """`worker` is the id of the worker that reports."""
        self._send = send
        self._worker = worker
        self._host = socket.gethostname()
        self._entered: Counter[str] = Counter()
        """How many states each live instance has entered."""
        self._states: asyncio.Queue[InstanceStateEntered | None] = asyncio.Queue(WAITING)

    def enter(self, instance: str, kind: Kind, state: State, reason: str = "") -> None:
        """Report that an instance entered a state."""
        event = InstanceStateEntered(
            instance=instance,
            worker=self._worker,
            number=self._entered[instance],
            kind=kind,
            state=state,
            host=self._host,
            reason=REDACTOR.text(reason, 1000),
        )
        try:
            self._states.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning("too many states wait: dropped the state %s of %s", state, instance)
            return
        self._entered[instance] += 1
        if state in ("gone", "failed"):
            del self._entered[instance]

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Send states, and report when the worker itself starts, ends or fails."""
        sending = asyncio.create_task(self._send_states(), name="instances")
        self.enter(self._worker, "worker", "provisioning")
        try:
            yield
            self.enter(self._worker, "worker", "gone")
        except HeadraceError as error:
            self.enter(self._worker, "worker", "failed", str(error))
            raise
        finally:
            try:
                async with asyncio.timeout(DRAIN_S):
                    await self._states.put(None)
                    await sending
            except TimeoutError:
                logger.warning("some states for `instances` were not sent within %s s", DRAIN_S)

    async def _send_states(self) -> None:
        while (event := await self._states.get()) is not None:
            await self._send(event)

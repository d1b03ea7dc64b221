"""What workers and sandboxes tell of their lives, in the topic `instances`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from headrace.schemas.events import Event, InstanceStateEntered

logger = logging.getLogger(__name__)

WAITING = 10_000
"""Most states that wait to be sent. More are left out: nothing is decided by them."""
DRAIN_S = 2.0

Kind = Literal["worker", "sandbox"]
State = Literal["provisioning", "ready", "busy", "failed", "gone"]


class Instances:
    """Takes states from anywhere, at once; `run` sends them in order."""

    def __init__(self, send: Callable[[Event], Awaitable[object]], worker: str) -> None:
        """`worker` is who says it."""
        self._send = send
        self._worker = worker
        self._host = socket.gethostname()
        self._said: Counter[str] = Counter()
        self._states: asyncio.Queue[InstanceStateEntered | None] = asyncio.Queue(WAITING)

    def enter(self, instance: str, kind: Kind, state: State, reason: str = "") -> None:
        """An instance has entered a state."""
        event = InstanceStateEntered(
            instance=instance,
            worker=self._worker,
            number=self._said[instance],
            kind=kind,
            state=state,
            host=self._host,
            reason=reason[:1000],
        )
        try:
            self._states.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning("left out of `instances`: %s is %s", instance, state)
            return
        self._said[instance] += 1
        if state in ("gone", "failed"):
            del self._said[instance]

    async def run(self) -> None:
        """Sends what comes, until `close`."""
        while (event := await self._states.get()) is not None:
            await self._send(event)

    async def close(self, running: asyncio.Task[None]) -> None:
        """Sends what waits, for a short while, and ends `run`."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._states.put(None)
                await running
        except TimeoutError:
            logger.warning("some states of instances were not sent in %s s", DRAIN_S)

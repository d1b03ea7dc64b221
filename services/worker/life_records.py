"""Records the life of a worker's process in the topic `instances`, from which `headrace cost` sums.

A worker that is killed can't say so. So each worker repeats its state after a twentieth of its age,
but not before a minute and not after an hour: the end of a killed worker is known to 5 % of its
life or a minute, and a worker writes about 250 records in a week.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import HeadraceError
from headrace.schemas.events import Event, InstanceStateEntered
from headrace.services.base.clock import now
from headrace.services.base.redactor import REDACTOR

logger = logging.getLogger(__name__)

SOONEST_S, LATEST_S, SHARE = 60.0, 3600.0, 0.05
"""The next record comes after this share of the worker's age, within these bounds."""
LAST_S = 2.0
"""Seconds that the last record may take."""

State = Literal["provisioning", "ready", "failed", "gone"]


def next_record_s(age_s: float) -> float:
    """Returns the seconds until the next record of a worker of this age."""
    return min(LATEST_S, max(SOONEST_S, SHARE * age_s))


@dataclass
class LifeRecords:
    """The life of one process. A record that can't be written is left out: no work waits for it."""

    send: Callable[[Event], Awaitable[object]]
    worker: str
    service: str
    policy: str
    began_s: float
    """When the process began, in seconds since the epoch."""
    ready: asyncio.Event
    """Set once the worker can be used."""
    _number: int = field(default=0, init=False)

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Records the life until the context ends, and then how it ended."""
        repeating = asyncio.create_task(self._repeat(), name="life records")
        end: State = "gone"
        reason = ""
        try:
            yield
        except HeadraceError as error:
            end, reason = "failed", str(error)
            raise
        except Exception as error:
            end, reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            repeating.cancel()
            await asyncio.gather(repeating, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._record(end, reason, 0.0)

    async def _repeat(self) -> None:
        while True:
            was_ready = self.ready.is_set()
            every_s = next_record_s(now() - self.began_s)
            await self._record("ready" if was_ready else "provisioning", "", every_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await (asyncio.Event() if was_ready else self.ready).wait()

    async def _record(self, state: State, reason: str, every_s: float) -> None:
        began_at = max(0, int(1000 * self.began_s))
        event = InstanceStateEntered(
            # A host may give the number of an ended process to a new one.
            instance=f"{self.worker}-{began_at}",
            worker=self.worker,
            number=self._number,
            kind="worker",
            state=state,
            host=socket.gethostname(),
            reason=REDACTOR.text(reason, 1000),
            service=self.service,
            policy=self.policy,
            began_at=began_at,
            every_ms=int(1000 * every_s),
        )
        self._number += 1
        try:
            await self.send(event)
        except HeadraceError as error:
            logger.warning("the life of this worker could not be recorded: %s", error)

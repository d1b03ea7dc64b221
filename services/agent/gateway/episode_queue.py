"""The episodes of a worker that wait for clients of its gateway."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.services.agent.gateway.chat_session import ChatSession
from headrace.services.agent.gateway.refusals import ApiError


class Keys(NamedTuple):
    """The API keys of one session."""

    chat: str
    report: str


@dataclass(eq=False)
class PendingEpisode:
    """An attempt that waits for a client or has one."""

    session: ChatSession
    keys: Keys
    task: Mapping[str, Any]
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class EpisodeQueue:
    """The attempts of a worker that wait for clients, in order."""

    def __init__(self) -> None:
        self.closed: ApiError | None = None
        """Why the gateway has no more episodes."""
        self._waiting: OrderedDict[PendingEpisode, None] = OrderedDict()
        self._playing = 0
        self._asking = 0
        self._came = asyncio.Event()

    @property
    def counts(self) -> dict[str, int]:
        """The number of attempts that wait for a client, of those that a client plays, and of
        clients: those that play and those that wait for an attempt.
        """
        clients = self._playing + self._asking
        return {"waiting": len(self._waiting), "playing": self._playing, "clients": clients}

    def close(self, reason: ApiError) -> None:
        """Refuses from now on whoever takes an episode, also those who wait for one."""
        self.closed = reason
        self._came.set()

    @contextmanager
    def waiting(self, pending: PendingEpisode) -> Iterator[None]:
        """Keeps an attempt in the queue within the `with` block, until it is taken."""
        self._waiting[pending] = None
        self._came.set()
        try:
            yield
        finally:
            if pending in self._waiting:
                del self._waiting[pending]
            else:
                self._playing -= 1

    async def take(self, wait_s: float) -> PendingEpisode | None:
        """Takes the attempt that has waited longest. Returns None if none comes within `wait_s`.

        Raises the ApiError of `close`.
        """
        self._asking += 1
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting and self.closed is None:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        finally:
            self._asking -= 1
        if self.closed is not None:
            raise self.closed
        pending, _ = self._waiting.popitem(last=False)
        self._playing += 1
        pending.taken.set()
        return pending

    def give_back(self, pending: PendingEpisode) -> None:
        """Returns an attempt to the head of the queue: the client that took it disconnected."""
        pending.taken.clear()
        self._playing -= 1
        self._waiting[pending] = None
        self._waiting.move_to_end(pending, last=False)
        self._came.set()
